"""The programs in docs/getting-started.md and docs/parallelize.md run as printed, started by torchrun."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from command_line import exit_code
from markdown import REPOSITORY, blocks_of
from patience import PATIENCE
from pool import Pool
from tiny_chat import CHATML, make_chat_tokenizer, talks, write_rows
from tiny_huggingface import make_model

transformers = pytest.importorskip("transformers")


def program_of(page: str, number: int = 0) -> str:
    """Return a block of Python on a page. A test in this file runs each of them."""
    found = [block for block in blocks_of(REPOSITORY / page) if block.language == "python"]
    assert len(found) == {"docs/getting-started.md": 1, "docs/parallelize.md": 4}[page]
    return found[number].text


def torchrun(program: str, folder: Path, processes: int) -> str:
    """Run the program under torchrun, and return what it prints on all processes."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    path = os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = subprocess.run(
        [*launcher, "program.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def loss_of(model: Any, tokens_BS: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens_BS, labels=tokens_BS).loss


def rendezvous() -> dict[str, str]:
    """Return torchrun's variables for a port that is free."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def program_body(rank: int, world_size: int, program: str, folder: Path, launched: dict[str, str]) -> None:
    """Run the program the way a process of torchrun runs it, without a process group. Write its output to a file."""
    dist.destroy_process_group()
    printed = (folder / f"printed-{rank}.txt").open("w", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch, printed, redirect_stdout(printed):
        patch.chdir(folder)
        for name, value in {**launched, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}.items():
            patch.setenv(name, str(value))
        exec(program, {"__name__": "__main__"})


def check_the_loop_in_getting_started(folder: Path, run: Callable[[str], object]) -> None:
    """Check that the program saves the same model as one process that trains with plain torch."""
    program = program_of("docs/getting-started.md")
    make_model(folder / "exported", "qwen3 tied", vocab_size=208)
    run(program)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, tuned = load(folder / "exported"), load(folder / "tuned")
    names: dict[str, Any] = {"torch": torch}
    data = re.search(r"^torch\.manual_seed.*\nbatches = .*$", program, re.MULTILINE)
    assert data
    exec(data[0], names)
    optimizer, first = torch.optim.AdamW(model.parameters(), lr=1e-4), loss_of(model, names["batches"][0]).item()
    for tokens_BS in names["batches"]:
        loss_of(model, tokens_BS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    trained = loss_of(model, names["batches"][0]).item()
    assert trained < first
    assert loss_of(tuned, names["batches"][0]).item() == pytest.approx(trained, rel=1e-5)


def test_the_loop_in_getting_started_trains_on_eight_launched_processes(pool: Pool, tmp_path: Path) -> None:
    """Start the processes from the pool, with torchrun's environment variables. With torchrun itself, eight processes
    would need half a minute to import transformers."""
    check_the_loop_in_getting_started(
        tmp_path, lambda program: pool.run(8, program_body, program, tmp_path, rendezvous())
    )


@pytest.mark.slow
def test_the_loop_in_getting_started_trains_as_one_process_does(tmp_path: Path) -> None:
    check_the_loop_in_getting_started(tmp_path, lambda program: torchrun(program, tmp_path, 8))


def test_the_packed_documents_of_the_page_run(pool: Pool, tmp_path: Path) -> None:
    pool.run(4, program_body, program_of("docs/parallelize.md", 1), tmp_path, rendezvous())


def prepare_chats(folder: Path) -> None:
    """Make the model and the chats of the tutorial, and run the tutorial's command that tokenizes the chats."""
    make_model(folder / "base", "qwen2", vocab_size=320)
    make_chat_tokenizer(folder / "base", CHATML)
    write_rows(folder / "chats.jsonl", talks(40))
    page = REPOSITORY / "docs" / "parallelize.md"
    (command,) = [block.text.strip() for block in blocks_of(page) if block.text.startswith("fourfold prepare")]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert exit_code(*command.split()[1:]) == 0


def check_the_adapters(folder: Path, printed: str) -> None:
    """Check that the loss falls, and that peft opens the adapters."""
    peft = pytest.importorskip("peft")
    losses = [float(each) for each in re.findall(r"step \d+: loss (\d\.\d+)", printed)]
    assert len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    tokens_BS = torch.arange(4, 20)[None]
    before = base(tokens_BS).logits
    after = peft.PeftModel.from_pretrained(base, folder / "adapter")(tokens_BS).logits
    assert (after - before).abs().max() > 0.01


def test_the_lora_tutorial_learns(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    prepare_chats(tmp_path)
    pool.run(4, program_body, program_of("docs/parallelize.md", 2), tmp_path, rendezvous())
    check_the_adapters(tmp_path, (tmp_path / "printed-0.txt").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_lora_tutorial_learns_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    prepare_chats(tmp_path)
    check_the_adapters(tmp_path, torchrun(program_of("docs/parallelize.md", 2), tmp_path, 4))


def check_the_trainer(folder: Path, run: Callable[[str], object], trainer: str = "Trainer") -> None:
    """Check that the program of the page trains the model that the trainer itself trains on one process."""
    program = program_of("docs/parallelize.md", 3)
    if trainer != "Trainer":
        program = program.replace("import torch\n", f"import torch\nfrom trl import SFTConfig, {trainer}\n")
        program = program.replace("(OnGrid, Trainer)", f"(OnGrid, {trainer})").replace(
            "= TrainingArguments(", "= SFTConfig(bf16=False, gradient_checkpointing=False, max_length=64, output_dir="
        )
        program = re.sub(r"train_dataset=.*\n.*", "train_dataset=chats, processing_class=tokenizer", program)
    prepare_chats(folder)
    run(program)
    begin, end = program.index("grid = "), program.index("tokenizer = ")
    alone = program[:begin] + program[end:]
    alone = alone.replace("= GridTrainer(", f"= {trainer}(").replace('"tuned"', '"alone"')
    alone = re.sub(r"trainer\.model = .*", "", alone)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(alone, {"__name__": "__main__"})
    before, tuned, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
        for name in ("base", "tuned", "alone")
    )
    # AdamW amplifies rounding errors of gradients near zero, so compare whole matrices.
    for name, weight in expected.items():
        assert (tuned[name] - weight).norm() < 1e-3 * (weight - before[name]).norm(), name


def test_the_trainer_of_transformers_trains_as_on_one_process(pool: Pool, tmp_path: Path) -> None:
    check_the_trainer(tmp_path, lambda program: pool.run(4, program_body, program, tmp_path, rendezvous()))


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
def test_trainers_train_as_on_one_process_under_torchrun(tmp_path: Path, trainer: str) -> None:
    if trainer == "SFTTrainer":
        pytest.importorskip("trl")
    check_the_trainer(tmp_path, lambda program: torchrun(program, tmp_path, 4), trainer)


def check_the_model_with_rules(program: str, folder: Path, processes: int) -> None:
    """Check that the program prints the gradient norm of one process with plain torch."""
    printed = torchrun(program, folder, processes)
    names: dict[str, Any] = {}
    exec(program[: program.index("grid = ")], names)
    model, tokens_BS = names["Decoder"](), torch.randint(64, (4, 17))
    logits_BSV = model(tokens_BS[:, :-1])
    torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten()).backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    found = [float(each) for each in re.findall(r"gradient norm (\d\.\d+)", printed)]
    assert found == pytest.approx([norm] * processes, rel=1e-5)


@pytest.mark.slow
def test_a_program_of_torchruns_needs_no_group(tmp_path: Path) -> None:
    """Run on half as many processes as the page says."""
    program = program_of("docs/parallelize.md")
    check_the_model_with_rules(program.replace("ParallelConfig(x=2, z=2)", "ParallelConfig(x=2)"), tmp_path, 2)


@pytest.mark.slow
def test_the_model_with_its_own_rules_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    check_the_model_with_rules(program_of("docs/parallelize.md"), tmp_path, 4)
