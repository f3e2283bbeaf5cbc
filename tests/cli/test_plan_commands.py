"""fourfold plan as a user types it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import Cli
from report_pages import check_looks, opened, without_scripts

from fourfold.config.presets import PRESETS
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.machines.names import machine_names
from fourfold.planning.request import BITS
from fourfold.planning.search.limits import CHOICES
from fourfold.planning.search.space import AXES
from fourfold.reports.layout_columns import gigabytes
from fourfold.reports.plan_terminal import PARTS_NAMED
from fourfold.run_file.load import load_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

REPOSITORY = Path(__file__).parents[2]
SMALL = ("plan", "--model", "llama3-8b", "--machine", "dgx-h100", "--gpus", 16, "--global-batch", 64)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_json_is_what_scripts_rely_on(cli: Cli) -> None:
    code, out, _ = cli(*SMALL, "--json", "--top", 3)
    record = json.loads(out)
    assert code == 0 and set(record) >= {"best", "ranked", "evaluated", "seconds"}
    wanted = (
        "parallel micro_batch_size activation_checkpoint step_seconds memory_bytes mfu hfu tokens_per_second_per_gpu"
    )
    assert set(record["best"]) >= set(wanted.split())
    assert len(record["ranked"]) == 3 and record["ranked"][0] == record["best"]
    assert record["evaluated"] > 1000 and record["seconds"] > 0


def test_planning_imports_no_torch() -> None:
    script = (
        "import sys; sys.argv = ['fourfold', *'plan --model llama3-8b --gpus 8 --global-batch 64 --json'.split()]; "
        "from fourfold.cli.app import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    modules = set(done.stderr.split())
    assert json.loads(done.stdout)["best"] and "fourfold.planning.search.plan" in modules
    assert not modules & {"torch", "transformers", "optuna", "matplotlib"}, "they take seconds to import"


def test_tables_and_explanation(cli: Cli) -> None:
    code, out, _ = cli(*SMALL, "--limit", "pp=1", "--limit", "cp=1", "--explain", "--tokens", "1e12", "--top", 2)
    assert code == 0
    for text in (
        "best on another grid",
        "If you change one choice",
        "1T tokens take",
        "GPU-hours",
        "checkpoint every",
        "compute",
    ):
        assert text in out, text
    assert "runner_up" not in out
    (command,) = (line for line in out.splitlines() if line.startswith("fourfold tune RUN.toml"))
    assert "batch_parts=" in command and len(command) > 80  # users can paste one long line
    parts = out.split("Seconds of a step")[1].split("│ all")[0]
    assert parts.count("\n│ ") == PARTS_NAMED


def test_a_written_run_file_loads(cli: Cli, tmp_path: Path) -> None:
    target = tmp_path / "planned.toml"
    code, out, errors = cli(*SMALL, "--limit", "pp=1", "--limit", "cp=1", "--write", target, "--json")
    run = load_run(target)
    assert "warning" not in errors
    best = json.loads(out)["best"]
    assert code == 0 and run.parallel.world_size == 16
    assert {axis: getattr(run.parallel, axis) for axis in best["parallel"]} == best["parallel"]
    assert run.training.micro_batch_size == best["micro_batch_size"]
    assert run.activation_checkpoint.mode == best["activation_checkpoint"]


def test_a_run_file_is_predicted_and_replanned(cli: Cli) -> None:
    code, out, _ = cli("plan", REPOSITORY / "examples" / "llama3-8b-8gpus.toml", "--machine", "dgx-h100", "--json")
    record = json.loads(out)
    run = load_run(REPOSITORY / "examples" / "llama3-8b-8gpus.toml")
    assert code == 0 and record["gpus"] == run.parallel.world_size
    assert record["own"]["parallel"]["z"] == run.parallel.z
    assert record["own"]["step_seconds"] >= record["best"]["step_seconds"] or record["own"]["p_out_of_memory"] > 0.05


def test_a_run_file_on_other_gpus_or_with_another_batch(cli: Cli, tmp_path: Path) -> None:
    run = REPOSITORY / "examples" / "llama3-8b-8gpus.toml"
    page = tmp_path / "plan.html"
    few = ("--limit", "pp=1", "--limit", "cp=1")
    code, out, _ = cli("plan", run, "--gpus", 16, "--top", 1, "--report", page, *few)
    assert code == 0 and " yours, on 8 GPUs " in out
    record = json.loads(cli("plan", run, "--gpus", 16, "--top", 1, "--json", *few)[1])
    assert f"<td>{record['own']['tokens_per_second_per_gpu']:,.0f}</td>" in page.read_text(encoding="utf-8")
    record = json.loads(cli("plan", run, "--global-batch", 3, "--json", *few)[1])
    assert record["own"] is None and "does not divide the global batch" in record["own_refused"]


def test_a_hugging_face_model_is_the_preset(cli: Cli, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
              "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
              "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ("--gpus", 8, "--global-batch", 32, "--json")
    imported, preset = (
        json.loads(cli("plan", "--model", model, *args)[1])["best"] for model in (tmp_path, "llama3-8b")
    )
    assert imported == preset


def test_a_quantized_model_is_planned_in_bf16_and_says_so(cli: Cli, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512, "vocab_size": 1024,
              "max_position_embeddings": 512}  # fmt: skip
    args = ("--gpus", 8, "--limit", "pp=1", "--json")
    records = []
    for added in ({}, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}):
        (tmp_path / "config.json").write_text(json.dumps(config | added))
        code, out, errors = cli("plan", "--model", tmp_path, *args)
        assert code == 0 and ("quantized weights (quantization_config), but the plan trains in bf16" in errors) == bool(
            added
        )
        records.append(json.loads(out)["best"])
    assert records[0] == records[1]
    _, _, errors = cli("plan", "scaling", "--model", tmp_path, "--precision", "fp8", "--gpus", "8,16", *args[2:])
    assert "the plan trains in fp8" in errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--model", "llama9", "--gpus", 8), "did you mean 'llama3-8b'"),
        (("--model", "llama3-8b"), "--gpus is missing"),
        (("--model", "llama3-8b", "--gpus", 0), "--gpus 0"),
        (("--model", "llama3-8b", "--gpus", 8, "--machine", "dgx-h10"), "did you mean 'dgx-h100'"),
        (("--model", "llama3-8b", "--gpus", 8, "--machine", "h100"), "did you mean 'dgx-h100' or 'grand-teton-h100'?"),
        (("--model", "llama3-8b", "--gpus", 8, "--machine", "H200-SXM"), "did you mean 'h200'?"),
        (("--model", "llama3-405b", "--gpus", 8), "GPUs would be enough"),
        (("--model", "llama3-8b", "--gpus", 8, "--precision", "fp4"), "choose from bf16"),
        (("--model", "llama3-8b", "--gpus", 8, "--limit", "q=1"), "--limit q=1"),
        (("--model", "gpt2", "--gpus", 8, "--seq", 4096), "position table"),
        (("--model", "none/config.json", "--gpus", 8), "cannot read none/config.json"),
        (("--model", "llama3-8b", "--gpus", 8, "--global-batch", -8), "--global-batch -8 must be from 1"),
        (("--model", "llama3-8b", "--gpus", 8, "--seq", 0), "--seq 0 must be from 1"),
        (("--model", "llama3-8b", "--gpus", 8, "--tokens", "nan"), "--tokens nan"),
        (("--model", "llama3-8b", "--gpus", 8, "--limit", "micro_batch_size=0"), "--limit micro_batch_size=0"),
        (("--model", "llama3-8b", "--gpus", 8, "--limit", "zero=7"), "--limit zero=7"),
        (
            ("--model", "gpt2", "--gpus", 8, "--limit", "x=2", "--limit", "x<=1"),
            "--limit x=2 --limit x<=1: these limits contradict",
        ),
        (
            ("--model", "gpt2", "--gpus", 8, "--limit", "zero=1", "--limit", "zero=2"),
            "these limits contradict each other (zero)",
        ),
        (
            ("--model", "gpt2", "--gpus", 8, "--limit", "schedule=1F1B", "--limit", "stages_per_rank=2"),
            "contradict each other (schedule, stages_per_rank)",
        ),
        (
            ("--model", "gpt2", "--gpus", 8, "--limit", "micro_batch_size=1", "--limit", "micro_batch_size=2"),
            "(micro_batch_size)",
        ),
        (("--model", "gpt2", "--gpus", 2, "--write", "/no/such/folder/x.toml"), "cannot write /no/such/folder/x.toml"),
        (("--model", "gpt2", "--gpus", 2, "--write", "."), "cannot write .: it is a folder"),
        (("--model", "gpt2", "--gpus", 8, "--limit", "schedule=ZBV"), "schedule= takes one of 1F1B, "),
        (
            ("--model", "gpt2", "--gpus", 1024, "--global-batch", 1024, "--limit", "micro_batch_size=16777216"),
            "is legal",
        ),
        (("scaling", "--model", "gpt2", "--gpus", "8,-4"), "--gpus 8,-4"),
        (("scaling", "--model", "gpt2", "--gpus", "8,33554432"), "at most 16,777,216"),
    ],
)
def test_bad_input_gets_one_sentence(cli: Cli, arguments: tuple[object, ...], sentence: str) -> None:
    code, out, error = cli("plan", *arguments)
    assert code == 2 and sentence in error and not out
    assert error.startswith("fourfold: ") and error.count("\n") == 1


def test_help_lists_every_choice(cli: Cli) -> None:
    code, out, _ = cli("plan", "layout", "--help")
    words = {word.strip(".") for word in re.split(r"[^\w.-]+", out)}
    assert code == 0
    choices = [*machine_names(), *PRESETS, *BITS, *CHOICES, *AXES, "micro_batch_size"]
    assert set(choices) | {choice for names in CHOICES.values() for choice in names} <= words


@pytest.mark.parametrize(
    ("size", "text"), [(4e5, "0.000400"), (2.54e6, "0.00254"), (16e9, "16.0"), (73.94e9, "73.9"), (150e9, "150")]
)
def test_a_memory_is_printed_with_three_digits(size: float, text: str) -> None:
    assert gigabytes(size) == text and gigabytes(1.2e12) == "1,200"


def test_doubts_are_in_the_terminal_and_as_json(cli: Cli) -> None:
    _, out, _ = cli(*SMALL, "--top", 2)
    record = json.loads(cli(*SMALL, "--top", 2, "--json")[1])["indistinct"]
    text = " ".join(out.split())
    assert record["count"] > 1 and record["ranked"] == 2
    assert f"{record['count']:,} layouts cannot be told apart" in text and "errors on published runs" in text
    assert f"fourfold tune RUN.toml --nproc 16 --space {record['space'][0]}" in text


def test_a_terminal_without_a_width_gets_the_default_width(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "0")
    assert "s/step" in cli(*SMALL, "--limit", "pp=1", "--top", 1)[1]


@pytest.mark.parametrize("columns", [80, 120])
def test_layouts_are_readable(cli: Cli, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Every layout has one line, with its choices in columns. If there is little room, a choice that is the same in all
    rows is printed only once."""
    monkeypatch.setenv("COLUMNS", str(columns))
    model = ("plan", "--model", "olmoe-1b-7b", "--machine", "dgx-h100", "--gpus", 16, "--global-batch", 64, "--top", 4)
    limits = ("--limit", "pp=2", "--limit", "schedule=1F1B,Interleaved1F1B", "--limit", "y=1")
    _, out, _ = cli(*model, *limits)
    ranked = json.loads(cli(*model, *limits, "--json")[1])["ranked"]
    lines = out.splitlines()
    # The command to paste may be wider than the terminal.
    assert max(len(line) for line in lines if not line.startswith("fourfold tune ")) <= columns
    said = re.search(r"In every row: (.*)\.", out)
    shared = dict(pair.rsplit(" ", 1) for pair in said[1].split(", ")) if said else {}
    assert (said is not None) == (columns == 80)
    rows = [line.split() for line in lines if re.match(r"[1-4] ", line)]
    assert len(rows) == len(ranked) == 4
    headers = lines[next(i for i, line in enumerate(lines) if line.startswith("──")) - 1].split()
    for row, layout in zip(rows, ranked, strict=True):
        for axis, size in layout["parallel"].items():
            if axis in ("pp", "dp", "cp", "z", "y", "x", "ep", "zero"):
                shown = shared[axis] if axis in shared else row[1 + headers.index(axis)]
                assert shown == str(size), axis
        low, high = next(cell for cell in row if "–" in cell).split("–")
        assert float(low) < layout["step_seconds"] < float(high)
        assert f"{layout['mfu']:.1%}" in row and gigabytes(layout["memory_bytes"]) in row
        assert f"{layout['memory_bytes'] / load_machine('dgx-h100').memory:.0%}" in row
    assert {"s/step", "interval", "MFU", "GB", "P(OOM)"} <= set(headers) and "cannot be told apart" in " ".join(
        out.split()
    )


def test_a_scaling_curve_is_readable_in_80_columns(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    limits = ("--limit", "pp=1", "--limit", "cp=1", "--limit", "x=4")
    code, out, _ = cli("plan", "scaling", "--model", "gpt-40b", "--machine", "perlmutter", "--gpus", "4096",
                       "--seq", 2048, "--global-batch", 8192, *limits)  # fmt: skip
    lines = out.splitlines()
    assert code == 0 and max(map(len, lines)) <= 80
    header = next(line for line in lines if "GPUs" in line)
    assert all(name in header for name in ("s/step", "tokens/s/GPU", "efficiency", "PFLOP/s"))
    assert "100.0%" in out and "4,096" in out
    assert "model" in out and "Most published speeds are Megatron PFLOP/s" in " ".join(out.split())


def test_the_flops_of_a_scaling_curve_are_the_flops_of_mfu(cli: Cli) -> None:
    """The FLOPs must be right even if the layout recomputes nothing, although Megatron-LM's count always includes a
    full recompute."""
    command = ("plan", "scaling", "--model", "llama3-8b", "--machine", "dgx-h100", "--gpus", "16:32", "--seq", 8192,
               "--global-batch", 64, "--limit", "recompute=none,selective", "--limit", "pp=1", "--limit", "y=1",
               "--limit", "batch_parts=1")  # fmt: skip
    points = json.loads(cli(*command, "--json")[1])["points"]
    _, out, _ = cli(*command)
    for point in points:
        rate = point["mfu"] * point["gpus"] * load_machine("dgx-h100").peak / 1e15
        assert point["model_pflops"] == pytest.approx(rate) and point["megatron_pflops"] > 1.3 * rate
        assert all(re.search(rf"\b{pflops:,.1f}\b", out) for pflops in (rate, point["megatron_pflops"]))
    assert "Model PFLOP/s count the same FLOPs as MFU" in out and "Megatron PFLOP/s always count" in out


def test_the_page_needs_no_network_and_shows_everything(cli: Cli, tmp_path: Path, browser: Browser) -> None:
    page = tmp_path / "plan.html"
    code, *_ = cli("plan", "--model", "llama3-8b", "--machine", "dgx-h100", "--gpus", 16, "--global-batch", 64,
                   "--limit", "pp=4", "--limit", "cp=1", "--tokens", "1e12", "--report", page)  # fmt: skip
    text = page.read_text(encoding="utf-8")
    assert code == 0 and not re.search(r"(src|href)=", without_scripts(text))
    for part in ("refused because", "Where a step's time goes", "each stage", "Neighbors", "GPU-hours",
                 "cannot be told apart", "fourfold tune"):  # fmt: skip
        assert part in unescape(text), part
    with opened(browser, page, 1280, "light") as shown:
        drawn = check_looks(shown)
        assert drawn["Where a step's time goes"].shapes > 5
        pictures = " ".join(shown.locator(".plot svg").evaluate_all("all => all.map(svg => svg.innerHTML)"))
    assert "NaN" not in pictures and "undefined" not in pictures


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
early_bird = true
[activation_checkpoint]
mode = "full"
"""


def test_plan_from_another_program_compares_its_layout_with_the_best_ones(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "titan.toml"
    file.write_text(TITAN)
    asked = ("plan", "--from", file, "--machine", "dgx-h100", "--gpus", 8, "--limit", "pp=1", "--top", 1)
    code, out, _ = cli(*asked)
    assert code == 0
    assert re.search(r"yours .* full ", out) and "best in torchtitan" in out and "90 %" in out
    assert "recompute = full" in out and "Not understood: training.early_bird = true." in out
    assert len(re.findall(r"The best layout in (torchtitan|fourfold) is \d\.\d\d times as fast as yours", out)) == 2
    record = json.loads(cli(*asked, "--json")[1])
    own, other = record["own"], record["other"]
    assert own["step_seconds"] == pytest.approx(other["predicted_seconds"]) and own["parallel"]["z"] == 8
    assert own["step_seconds"] >= record["theirs"]["step_seconds"] and other["program"] == "torchtitan"
    assert other["not_understood"] == ["training.early_bird = true"] and other["measured_seconds"] is None


def test_plan_from_fits_the_constants_to_a_measured_step_and_writes_a_run_file(cli: Cli, tmp_path: Path) -> None:
    file, run = tmp_path / "titan.toml", tmp_path / "run.toml"
    file.write_text(TITAN)
    asked = ("plan", "--from", file, "--machine", "dgx-h100", "--gpus", 8, "--limit", "pp=1")
    code, out, _ = cli(*asked, "--measured", 1.5, "--json", "--write", run, "--report", tmp_path / "plan.html")
    record = json.loads(out)
    assert code == 0 and record["own"]["step_seconds"] == pytest.approx(1.5, rel=0.05)
    assert "best in torchtitan" in (tmp_path / "plan.html").read_text()
    assert record["other"]["measured_seconds"] == 1.5 and load_run(run).training.seq_length == 8192
    assert "Measured: 1.5 s per step. Predicted: " in cli(*asked, "--measured", 1.5)[1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", "titan.toml"), "add --machine --gpus"),
        (("--from", "gone.sh"), "cannot be read"),
        (("--measured", "1"), "--measured needs --from"),
        (("--from", "titan.toml", "--machine", "dgx-h100", "--gpus", "1000000000"), "--gpus 1000000000 must be"),
        (("--from", "titan.toml", "--measured", "0"), "--measured"),
        (("--from", "titan.toml", "--set", "a.b=1"), "takes neither a run file nor --set"),
        (("--from", "titan.toml", "--machine", "dgx-h100", "--gpus", "8", "--precision", "fp7"), "precision"),
    ],
)
def test_plan_from_refuses_what_it_cannot_read(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("titan.toml").write_text(TITAN)
    code, out, err = cli("plan", *options)
    assert code == 2 and words in err and len(err.strip().splitlines()) == 1 and not out
