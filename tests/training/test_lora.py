"""LoRA on the grid computes the same numbers as peft and does not change the base model. You can export its adapters,
and resume on another grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli
from pool import Pool
from tiny_chat import write_rows
from tiny_huggingface import make_model
from tiny_runs import DEEPSEEK, GPT, LLAMA, MIXTURE, QWEN, random_global_batch, tiny_run

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.config.run import RunConfig
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.errors import UserError
from fourfold.huggingface.export_model import export_huggingface
from fourfold.huggingface.import_model import load_pretrained
from fourfold.huggingface.weights import Pretrained
from fourfold.models.lora import check_targets
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import gather_full
from fourfold.run_file.load import make_run
from fourfold.training.job import Job
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.parity import parity
from fourfold.verification.parity_report import ParityReport

LORA = {"rank": 4, "alpha": 12.0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one process": (LLAMA, {}, {}),
    "dp2": (LLAMA, {"dp": 2}, {}),
    "pp2 x2": (GPT, {"pp": 2, "x": 2}, {"training": {"micro_batch_size": 1}}),
    "x2 cp2": (LLAMA, {"x": 2, "cp": 2}, {}),
    "pp2, a target only in the first stage": (
        DEEPSEEK | {"shared_expert_intermediate_size": 0},
        {"pp": 2},
        {"lora": LORA | {"targets": ["gate_proj", "q_proj"]}},
    ),
}
SLOW_CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "x2 offloaded": (LLAMA, {"x": 2}, {"activation_checkpoint": {"mode": "full", "offload": True}}),
    "z2 dp2 zero 3 recomputed": (GPT, {"z": 2, "dp": 2, "zero": 3}, {"activation_checkpoint": {"mode": "full"}}),
    "x2 y2, two targets": (LLAMA, {"x": 2, "y": 2}, {"lora": LORA | {"targets": ["q_proj", "down_proj"]}}),
    "x2 y2 z2": (QWEN, {"x": 2, "y": 2, "z": 2}, {}),
}


def parity_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    return parity(run, torch.device("cpu"))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)])
def test_layout_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    model, grid, sections = (CASES | SLOW_CASES)[name]
    run = tiny_run(model, grid, output_dir=str(tmp_path), **({"lora": LORA} | sections))
    report = pool.run(run.parallel.world_size, parity_body, run)[0]
    assert report.ok, report.record()
    assert all(gradient.tensor.endswith(("lora_A", "lora_B")) for gradient in report.deviations["gradients"])


def tuning_run(folder: Path, grid: dict[str, int], out: Path, **training: Any) -> RunConfig:
    """Return a run that tunes a model of transformers."""
    return make_run(
        {
            "output_dir": str(out),
            "model": {"from_hf": str(folder)},
            "data": {"source": "python-stdlib"},
            "lora": LORA,
            "parallel": grid,
            "optimizer": {"lr": 1e-2},
            "training": {"global_batch_size": 8, "micro_batch_size": 2, "seq_length": 16, "train_steps": 4, **training},
        }
    )


def tuned_body(rank: int, world_size: int, run: RunConfig) -> dict[str, Any] | None:
    """Take two steps, and save a checkpoint. Return the loss and the gradients of a third batch, all weights, and the
    number of bytes of the checkpoint's tensors."""
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    load_pretrained(job, run.model.from_hf)
    for step in range(3):
        micro_batches = random_micro_batches(run, step, job.grid, job.device)
        if step < 2:
            job.train_step(micro_batches, step)
    folder = Path(run.output_dir) / run.name / "checkpoints"
    Checkpointer(folder, job, run.checkpoint).save(2)
    kept = job.count_kept(micro_batches)
    loss = job.forward_backward(micro_batches, kept)
    gradients = gather_full(job.trained, [shard.grad for shard in job.trained])
    weights = gather_full(job.shards, [shard.local for shard in job.shards])
    if rank:
        return None
    state_bytes = sum(file.stat().st_size for file in (folder / "step_2").glob("*.safetensors"))
    return {"loss": loss.item(), "gradients": gradients, "weights": weights, "bytes": state_bytes}


@pytest.mark.parametrize(
    "grid", [pytest.param({"x": 2, "y": 2, "z": 2}, marks=pytest.mark.slow), {"x": 2, "z": 2}], ids=str
)
def test_peft_opens_the_adapter_and_computes_the_same(pool: Pool, tmp_path: Path, grid: dict[str, int]) -> None:
    """Compare the loss and every gradient with peft's model, and check that the base has not changed by a bit."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = make_model(tmp_path / "base", "llama gqa tied", vocab_size=208)
    run = tuning_run(folder, grid, tmp_path / "runs")
    tuned = pool.run(run.parallel.world_size, tuned_body, run)[0]
    pretrained = Pretrained(folder, run.model)
    for name, shape in pretrained.shapes.items():
        original = torch.empty(shape)
        pretrained.read_into(original, name, tuple(slice(0, n) for n in shape))
        assert torch.equal(tuned["weights"][name], original), name
    assert tuned["bytes"] < 3.5 * sum(g.nbytes for g in tuned["gradients"].values()) + 200_000, "adapters and moments"

    export_huggingface(tmp_path / "runs" / "run", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    batch = random_global_batch(run, 2)
    logits = model(input_ids=batch.tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    loss.backward()
    assert tuned["loss"] == pytest.approx(loss.item(), rel=1e-5)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert len(theirs) == len(tuned["gradients"])
    for name, gradient in theirs.items():
        ours = name.removeprefix("base_model.model.model.").replace(".default.weight", "")
        ours = ours.replace("self_attn.q", "self_attn.qkv.q").replace("self_attn.k", "self_attn.qkv.k")
        ours = ours.replace("self_attn.v", "self_attn.qkv.v").replace("mlp.gate", "mlp.up.gate")
        ours = ours.replace("mlp.up_proj", "mlp.up.up_proj")
        difference = (tuned["gradients"][ours] - gradient).norm() / gradient.norm()
        assert difference < 1e-5, (name, difference)

    export_huggingface(tmp_path / "runs" / "run", tmp_path / "merged", merge=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (merged(input_ids=batch.tokens).logits - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        pytest.param("gpt2", None, marks=pytest.mark.slow),
        ("gpt_neox", ["q_proj", "v_proj", "down_proj"]),
        ("glm", ["q_proj", "k_proj", "up_proj"]),
        ("qwen3_5", ["q_proj", "gate_proj", "v_proj", "b_proj", "o_proj"]),
        ("deepseek_v3", ["q_nope_proj", "q_rope_proj", "kv_a_proj", "k_nope_proj", "v_proj", "o_proj"]),
        pytest.param("phi3", ["up_proj", "o_proj", "k_proj"], marks=pytest.mark.slow),
    ],
)
def test_adapters_of_joined_layers_are_one_of_pefts(
    name: str, targets: list[str] | None, pool: Pool, tmp_path: Path
) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = make_model(tmp_path / "base", name, vocab_size=208)
    run = tuning_run(folder, {"x": 2}, tmp_path / "runs")
    run = run.model_copy(update={"lora": run.lora.model_copy(update={"targets": targets})})
    tuned = pool.run(2, tuned_body, run)[0]
    export_huggingface(tmp_path / "runs" / "run", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    batch = random_global_batch(run, 2)
    logits = model(input_ids=batch.tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
    assert tuned["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert (model.merge_and_unload()(input_ids=batch.tokens).logits - logits).abs().max() < 1e-4 * logits.abs().max()


def test_adapters_that_peft_gives_to_experts_are_not_exported(pool: Pool, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "base", "deepseek_v3", vocab_size=208)
    run = tuning_run(folder, {"x": 2}, tmp_path / "runs")
    pool.run(2, tuned_body, run)
    with pytest.raises(
        UserError, match="as adapters of the experts, but the experts have no adapters; export the merged model"
    ):
        export_huggingface(tmp_path / "runs" / "run", tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def resumed_body(rank: int, world_size: int, run: RunConfig, checkpoint: Path) -> float:
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    load_pretrained(job, run.model.from_hf)
    assert load_checkpoint(checkpoint, job) == 2
    micro_batches = random_micro_batches(run, 2, job.grid, job.device)
    return job.forward_backward(micro_batches, job.count_kept(micro_batches)).item()


def test_adapters_resume_on_another_grid(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_model(tmp_path / "base", "qwen3", vocab_size=208)
    tuned = pool.run(4, tuned_body, tuning_run(folder, {"z": 2, "x": 2}, tmp_path / "runs"))[0]
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / "step_2"
    for grid in ({"y": 2}, {"dp": 2, "z": 2, "zero": 3}):
        run = tuning_run(folder, grid, tmp_path / "others")
        assert pool.run(run.parallel.world_size, resumed_body, run, checkpoint)[0] == pytest.approx(
            tuned["loss"], rel=1e-5
        )
    others = make_model(tmp_path / "another", "qwen3", vocab_size=208)
    on_another = run.model_copy(update={"model": run.model.model_copy(update={"from_hf": str(others)})})
    with pytest.raises(UserError, match=r"belong to the model .*base, but model.from_hf is .*another"):
        pool.run(4, resumed_body, on_another, checkpoint)
    other = run.model_copy(update={"lora": run.lora.model_copy(update={"alpha": 1.0})})
    with pytest.raises(UserError, match=r"lora\.alpha = 12\.0, but the run file has 1\.0"):
        pool.run(4, resumed_body, other, checkpoint)


def types_body(rank: int, world_size: int, run: RunConfig) -> list[tuple[str, torch.dtype, bool]]:
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    job.initialize(0)
    before = [shard.local.clone() for shard in job.shards]
    losses = []
    for step in range(4):
        micro_batches = random_micro_batches(run, 0, job.grid, job.device)
        losses.append(job.train_step(micro_batches, step).loss.item())
    assert losses[-1] < losses[0]
    moved = [not torch.equal(shard.local, old) for shard, old in zip(job.shards, before, strict=True)]
    return [(shard.name, shard.local.dtype, m) for shard, m in zip(job.shards, moved, strict=True)]


@pytest.mark.parametrize("grid", [{"x": 2}, {"z": 2}], ids=str)
def test_the_base_stays_in_bf16_and_the_adapters_in_fp32(pool: Pool, grid: dict[str, int]) -> None:
    run = tiny_run(LLAMA, grid, lora=LORA, training={"precision": "bf16"}, optimizer={"lr": 1e-2})
    for name, dtype, moved in pool.run(2, types_body, run)[0]:
        is_adapter = name.endswith(("lora_A", "lora_B"))
        assert dtype == (torch.float32 if is_adapter else torch.bfloat16)
        assert moved == is_adapter, name


def test_a_run_file_trains_adapters_and_exports_them(cli: Cli, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    folder = make_model(tmp_path / "base", "llama", vocab_size=300)
    rows = [{"prompt": "a" * (1 + i % 7), "completion": "b" * (1 + i % 5)} for i in range(40)]
    prepare_conversations([write_rows(tmp_path / "rows.jsonl", rows)], tmp_path / "c", tokenizer="bytes")
    run_file = tmp_path / "tune.toml"
    run_file.write_text(
        f"""
        name = "tune"
        output_dir = "{tmp_path}"
        [model]
        from_hf = "{folder}"
        [data]
        format = "sft"
        train = [{{ path = "{tmp_path / "c"}" }}]
        [lora]
        rank = 2
        [training]
        global_batch_size = 4
        micro_batch_size = 2
        seq_length = 32
        train_steps = 2
        """
    )
    code, out, err = cli("train", run_file)
    assert code == 0 and "rank 2" in out + err, err
    code, out, err = cli("train", run_file, "--set", "training.train_steps=3")
    assert code == 0, err
    code, out, err = cli("checkpoint", "export-hf", tmp_path / "tune", tmp_path / "adapter", "--json")
    assert code == 0 and json.loads(out)["model_type"] == "LoRA of llama", err
    for option in (["--dtype", "bf16"], ["--model-type", "llama"], ["--tokenizer", "bytes"]):
        code, _, err = cli("checkpoint", "export-hf", tmp_path / "tune", tmp_path / "refused", *option)
        assert code == 2 and f"{option[0]} is for a whole model" in err, err
    base = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert peft.PeftModel.from_pretrained(base, tmp_path / "adapter").peft_config["default"].r == 2


def test_what_makes_no_sense_is_refused(cli: Cli, tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(
        f'output_dir = "{tmp_path}"\n[model]\npreset = "llama-tiny"\n[data]\nsource = "python-stdlib"\n'
        "[lora]\nrank = 2\n[training]\nglobal_batch_size = 4\nseq_length = 32\ntrain_steps = 2\n"
    )
    code, _, err = cli("train", run_file)
    assert code == 2 and "name one in model.from_hf" in err
    run = tiny_run(GPT, {"pp": 2}, lora=LORA | {"targets": ["gate_proj"]})
    with pytest.raises(UserError, match="this model has no gate_proj"):
        check_targets(run.model, run.lora, [range(1), range(1, 2)])
    run = tiny_run(MIXTURE, {}, lora=run.lora.model_dump())
    with pytest.raises(UserError, match="this model has no gate_proj outside of experts, which get no adapters; it"):
        check_targets(run.model, run.lora, [range(2)])
    run = tiny_run(DEEPSEEK | {"shared_expert_intermediate_size": 0}, {"pp": 2}, lora=run.lora.model_dump())
    with pytest.raises(UserError, match=r"a pipeline stage has no gate_proj, so it would train nothing; add .*_proj"):
        check_targets(run.model, run.lora, [range(2), range(2, 4)])
    with pytest.raises(UserError, match="computes weight gradients separately"):
        tiny_run(GPT, {"pp": 2, "schedule": "ZBVZeroBubble"}, lora=LORA)
