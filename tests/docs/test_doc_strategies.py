"""Every formula and number of the pages on pipelines, context parallelism, and memory, compared with the code."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from typing import Any

import pytest
from letters import letters_of
from markdown import REPOSITORY, blocks_of, formula_in, tables_of
from tiny_runs import GPT, LLAMA, tiny_run

from benchmarks.pipeline_times import bubble, timeline
from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.presets import PRESETS
from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.config.stages import stage_layers
from fourfold.parallel.attention.context import chunks_of
from fourfold.parallel.pipeline.schedule import schedule_ops
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.cost.weight_traffic import weight_traffic_seconds
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of_model
from fourfold.run_file.load import load_run, make_run
from fourfold.verification.trace import TraceReport, trace

DOCS = REPOSITORY / "docs"
PIPELINE, CONTEXT, MEMORY, PARALLELISM = (
    DOCS / f"{name}.md" for name in ("pipeline", "context", "memory", "parallelism")
)


def sent(report: TraceReport, rank: int | None = None) -> dict[tuple[str, str, str], int]:
    collectives = report.collectives if rank is None else report.pipeline[rank].collectives
    return {(line.axis, line.op, line.purpose): line.bytes for line in collectives}


def formula_after(page_text: str, words: str, **letters: float) -> float:
    """Return the value of the first code expression after some words on a page."""
    code = re.search(r"\s+".join(map(re.escape, words.split())) + r"\s+(`[^`]+`)", page_text)
    assert code, words
    return formula_in(code[1], min=min, **letters)


def test_the_bubble_formulas() -> None:
    text = PIPELINE.read_text(encoding="utf-8")
    for p, m in ((2, 4), (4, 4), (4, 16)):
        plain = formula_after(text, "In GPipe and 1F1B, the bubble takes", p=p, m=m)
        for schedule in ("GPipe", "1F1B"):
            grid = ParallelConfig(pp=p, schedule=schedule)
            assert bubble(timeline(schedule_ops(grid, m), grid)) == pytest.approx(plain)
        for v in (2, 4):
            grid = ParallelConfig(pp=p, schedule="Interleaved1F1B", stages_per_rank=v)
            pieces = formula_after(text, "pipeline fills faster, and the bubble is", p=p, m=m, v=v)
            assert bubble(timeline(schedule_ops(grid, m), grid)) == pytest.approx(pieces)


def test_the_layers_of_stages() -> None:
    rows = tables_of(PIPELINE)["model | pp | layers in each stage"]
    assert len(rows) == 3
    for name, pp, layers in rows:
        stages = stage_layers(ModelConfig(**PRESETS[name.strip("`")]), ParallelConfig(pp=int(pp)))
        assert layers == ", ".join(str(len(stage)) for stage in stages)


@pytest.mark.parametrize("grid", [{"x": 2, "cp": 2}, {"y": 2}], ids=str)
def test_a_border_sends_what_the_page_says(grid: dict[str, int]) -> None:
    run = tiny_run(
        GPT | {"num_attention_heads": 8}, {"pp": 2, **grid}, training={"precision": "bf16", "global_batch_size": 4}
    )
    letters, report = letters_of(run), trace(run, whole=True)
    (forward, over, operation, formula), (backward, _, _, other) = tables_of(PIPELINE)[
        "what | over | operation | bytes"
    ]
    micro_batches = run.gradient_accumulation_steps
    assert sent(report, 0)[over, operation, forward] == micro_batches * formula_in(formula, **letters)
    assert sent(report, 1)[over, operation, backward] == micro_batches * formula_in(other, **letters)
    ((tied, over, operation, formula),) = tables_of(PIPELINE)["once per step | over | operation | bytes"]
    for rank in range(2):
        assert sent(report, rank)[over, operation, tied] == formula_in(formula, **letters)


KEPT = "model | what the backward pass recomputes | bytes kept"


def kept_by_a_block(model: str, recomputed: str, run: RunConfig) -> float:
    """Return the bytes that the formula in docs/memory.md gives for a block."""
    ((_, _, formula),) = [row for row in tables_of(MEMORY)[KEPT] if row[0] in (model, "both") and row[1] == recomputed]
    return formula_in(formula, **letters_of(run))


@pytest.mark.parametrize(
    ("model", "micro_batches"),
    [("GPT", 5), pytest.param("Llama", 5, marks=pytest.mark.slow), pytest.param("Llama", 2, marks=pytest.mark.slow)],
)
def test_a_rank_keeps_a_micro_batch_more_than_the_next(model: str, micro_batches: int) -> None:
    """Compare middle ranks, which have equal stages, with enough and with too few micro-batches to fill the
    pipeline."""
    sizes = {"GPT": GPT, "Llama": LLAMA}[model] | {"num_hidden_layers": 6, "max_position_embeddings": 128}
    text = PIPELINE.read_text(encoding="utf-8")
    # Use bf16. In float32, attention repeats the key-value heads, which the formula does not count.
    training = {"global_batch_size": 2 * micro_batches, "seq_length": 128, "precision": "bf16"}
    run = tiny_run(sizes, {"pp": 4, "layers_per_stage": [1, 2, 2, 1]}, training=training)
    letters = letters_of(run) | {
        "L": 2,
        "C": kept_by_a_block(model, "nothing", run),
        "R": run.model.head_dim / 2 if model == "Llama" else 0,
    }
    report = trace(run, whole=True)
    under_way = [
        formula_after(text, "With 1F1B, rank r stores the activations of", m=micro_batches, p=4, r=r) for r in (1, 2)
    ]
    one = formula_after(text, "For each micro-batch, a rank stores", **letters)
    peaks = [report.pipeline[rank].memory.activations_peak for rank in (1, 2)]
    assert peaks[0] - peaks[1] == (under_way[0] - under_way[1]) * one


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] if i % 6 else []) for i, row in enumerate(tables_of(MEMORY)[KEPT])],
    ids=lambda row: " ".join(row[:2]),
)
def test_a_block_keeps_what_the_page_says(row: list[str]) -> None:
    """The bytes of a block are the difference between a model and a model with one more layer."""
    model, recomputed, formula = row
    recompute: dict[str, Any] = {"mode": (re.search(r"`(full|selective)", recomputed) or ["", "none"])[1]}
    if modules := re.search(r"\[\"(\w+)\"\]", recomputed):
        recompute["modules"] = [modules[1]]
    recompute["offload"] = "offload" in recomputed
    peaks, sizes = [], LLAMA if model == "Llama" else GPT
    for layers in (2, 3):
        run = tiny_run(
            sizes | {"num_hidden_layers": layers, "max_position_embeddings": 1024},
            training={"global_batch_size": 1, "micro_batch_size": 1, "seq_length": 1024, "precision": "bf16"},
            activation_checkpoint=recompute,
        )
        peaks.append(trace(run, whole=True).memory.activations_peak)
    assert peaks[1] - peaks[0] == formula_in(formula, **letters_of(run))


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_the_context_axis_keeps_its_share(method: str) -> None:
    peaks = []
    for layers in (2, 3):
        run = tiny_run(
            LLAMA | {"num_hidden_layers": layers},
            {"cp": 2, "cp_method": method},
            training={"global_batch_size": 1, "micro_batch_size": 1, "seq_length": 512, "precision": "bf16"},
        )
        peaks.append(trace(run, whole=True).memory.activations_peak)
    text = CONTEXT.read_text(encoding="utf-8")
    more = formula_after(text, "Ulysses needs", **letters_of(run)) if method == "ulysses" else 0
    assert peaks[1] - peaks[0] == kept_by_a_block("Llama", "nothing", run) + more


@pytest.mark.parametrize(
    "grid",
    [
        {"cp": 2, "x": 2},
        *(pytest.param({"cp": 2} | more, marks=pytest.mark.slow) for more in ({}, {"cp": 4}, {"y": 2})),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_over_cp_sends_what_the_page_says(method: str, grid: dict[str, int]) -> None:
    reports = []
    for layers in (1, 2):
        run = tiny_run(
            LLAMA | {"num_hidden_layers": layers},
            grid | {"cp_method": method},
            training={"global_batch_size": 2, "seq_length": 64, "precision": "bf16"},
        )
        reports.append(sent(trace(run, whole=True)))
    block = {line: reports[1][line] - reports[0][line] for line in reports[1] if "attention" in line[2]}
    said: dict[tuple[str, str, str], float] = {}
    for name, _, operation, what, formula in tables_of(CONTEXT)["method | pass | operation | what | bytes"]:
        if name == method:
            line = ("cp", operation, what)
            said[line] = said.get(line, 0) + formula_in(formula, **letters_of(run))
    assert block == said


def test_who_has_which_chunks() -> None:
    rows = tables_of(CONTEXT)["rank | chunks with cp = 4"]
    assert [row[1] for row in rows] == [", ".join(map(str, chunks_of(rank, 4))) for rank in range(4)]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("row", tables_of(MEMORY)["run file | weights | gradients | optimizer | working copy"])
def test_the_bytes_of_a_weight(row: list[str]) -> None:
    file, *numbers = row
    rounding = "stochastic_rounding" in file
    text = " ".join(re.findall(r"`([^`]+)`", file))
    training = {"precision": "bf16", "master_weights": "bf16"} if rounding else tomllib.loads(text.replace('" ', '"\n'))
    run = tiny_run(LLAMA, training=training, optimizer={"stochastic_rounding": rounding})
    memory, weights = trace(run, whole=True).memory, num_parameters(run.model)
    counted = (memory.parameters, memory.gradients, memory.optimizer, memory.gathered_weights_peak)
    assert [formula_in(number) * weights for number in numbers] == list(counted)


@pytest.mark.slow
def test_the_memory_of_a_pipeline_is_the_traces() -> None:
    (shown,) = [block.text for block in blocks_of(PIPELINE) if block.language == "toml"]
    report = trace(make_run(tomllib.loads(shown)))
    rows = tables_of(PIPELINE)["rank | layers | activations peak, GiB | total peak, GiB"]
    for rank, row in zip(report.pipeline, rows, strict=True):
        ((first, stop),) = rank.layers
        peaks = (f"{size / 2**30:.3f}" for size in (rank.memory.activations_peak, rank.memory.total_peak))
        layers = str(first) if stop == first + 1 else f"{first} to {stop - 1}"
        assert row == [str(rank.pp_rank), layers, *peaks]


@pytest.mark.slow
@pytest.mark.parametrize(("column", "method"), [(1, "auto"), (2, "ring")])
def test_the_memory_of_a_long_sequence_is_the_traces(column: int, method: str) -> None:
    (command,) = [b.text for b in blocks_of(CONTEXT) if "131072" in b.text]
    run = load_run(
        REPOSITORY / "examples" / "llama3-8b-8gpus.toml",
        [*re.findall(r"--set (\S+)", command), f"parallel.cp_method={method}"],
    )
    report = trace(run)
    sizes = report.record()["memory"] | {
        "sent over cp for attention": sum(line.bytes for line in report.collectives if "attention" in line.purpose)
    }
    rows = tables_of(CONTEXT)["GiB on one rank | `ulysses` (chosen by `auto`) | `ring`"]
    assert len(rows) == len(sizes)
    for row in rows:
        assert row[column] == f"{sizes.get(row[0], sizes.get(row[0].replace(' ', '_'))) / 2**30:.3f}", row[0]


def test_two_levels_are_predicted_from_the_machine_files() -> None:
    header = "machine | z | GPT-5B, ms | faster | GPT-20B, ms | faster"
    rows = tables_of(DOCS / "overlap_measured.md")[header]
    assert len(rows) == 15
    for name, z, *cells in rows:
        machine = load_machine(name)
        expected = []
        for preset in ("gpt-5b", "gpt-20b"):
            work = workload_of_model(ModelConfig(**PRESETS[preset])).but(z=int(z.replace(",", "")))
            one, two = (
                1e3 * float(weight_traffic_seconds(work.but(shards_per_node=n), machine, constants_for(machine),
                                                   work.model.block_weights, 2))
                for n in (1, machine.gpus_per_node)
            )  # fmt: skip
            expected += [f"{one:.1f} → {two:.1f}", f"{one / two:.2f}"]
        assert cells == expected, (name, z)


def test_bytes_of_two_levels_are_the_traces() -> None:
    """Compare the bytes that rings send for the full tensors that the trace counts."""
    run = tiny_run(LLAMA, {"z": 8}, training={"global_batch_size": 16})
    flat, levels = (
        sent(trace(run.model_copy(update={"overlap": run.overlap.model_copy(update={"shards_per_node": n})})))
        for n in (1, 4)
    )
    one, inside, across = tables_of(DOCS / "overlap.md")[
        "level | bytes that a rank sends | bytes that leave a node | steps"
    ]
    for op, why in (("all_gather", "weights"), ("reduce_scatter", "gradients")):
        letters = {"F": flat["z", op, why], "n": 8, "I": 4}
        assert formula_in(one[1], **letters) == 7 / 8 * flat["z", op, why]
        assert formula_in(inside[1], **letters) == 3 / 4 * levels["z inside nodes", op, why]
        assert formula_in(across[1], **letters) == 1 / 2 * levels["z across nodes", op, why]
        assert formula_in(across[2], **letters) == 4 * formula_in(across[1], **letters)


@pytest.mark.slow
def test_the_exposed_shares_are_the_traces() -> None:
    page = DOCS / "overlap.md"
    (command,) = [b.text for b in blocks_of(page) if "gpt-80b" in b.text]
    settings = re.findall(r"--set (\S+)", command)
    header = "axis | GiB per step on one rank | exposed, 1 part | exposed, 2 parts | exposed, 4 parts"
    rows = tables_of(page)[header]
    for column, parts in ((2, 1), (3, 2), (4, 4)):
        run = load_run(REPOSITORY / "examples" / "gpt-320b-32768gpus.toml", [*settings, f"overlap.batch_parts={parts}"])
        traced = trace(run)
        assert f"{traced.memory.activations_peak / 2**20:,.0f}" in page.read_text(encoding="utf-8")
        sent, exposed = Counter[str](), Counter[str]()
        for line in traced.collectives:
            for axis in (line.axis, "all"):
                sent[axis] += line.bytes
                exposed[axis] += line.exposed_bytes
        assert {row[0] for row in rows} == {axis for axis in sent if sent[axis] >= 2**30}
        for row in rows:
            traced_row = f"{sent[row[0]] / 2**30:.1f}", f"{exposed[row[0]] / sent[row[0]]:.0%}"
            assert (row[1], row[column]) == traced_row, (row[0], parts)
