"""Every formula of docs/parallelism.md, compared with the trace."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from typing import Any

import pytest
from letters import letters_of
from markdown import REPOSITORY, formula_in, tables_of
from tiny_runs import GPT, LLAMA, tiny_run

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.verification.trace import TraceReport, trace

TABLES = tables_of(REPOSITORY / "docs" / "parallelism.md")
Line = tuple[str, str, str]


def bytes_of(report: TraceReport) -> Counter[Line]:
    return Counter({(line.axis, line.op, line.purpose): line.bytes for line in report.collectives})


def of_tables(headers: list[str], run: RunConfig) -> Counter[Line]:
    """Return the bytes in the page's tables by (name, axis, operation). Forward and backward may share a name."""
    said: Counter[Line] = Counter()
    for name, axis, operation, formula in itertools.chain.from_iterable(TABLES[header] for header in headers):
        if getattr(run.parallel, axis) > 1:
            said[axis, operation, re.sub(r" \(.*\)", "", name)] += formula_in(formula, **letters_of(run))
    return said


def of_a_block(run: RunConfig) -> Counter[Line]:
    """Return the trace of one block: the trace with one more layer, minus the run's own trace."""
    more = run.model_copy(
        update={"model": run.model.model_copy(update={"num_hidden_layers": run.model.num_hidden_layers + 1})}
    )
    return bytes_of(trace(more, whole=True)) - bytes_of(trace(run, whole=True))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("model", "grid"),
    [(LLAMA, {"x": 2, "y": 2}), (GPT, {"x": 2}), (GPT, {"x": 2, "y": 4})],
    ids=str,
)
def test_the_tables_of_a_block_and_of_the_head_say_what_the_trace_counts(
    model: dict[str, Any], grid: dict[str, int]
) -> None:
    batch = {"micro_batch_size": 4, "global_batch_size": 4 * grid.get("z", 1), "precision": "bf16"}
    run = tiny_run(model, grid, training=batch)
    whole = bytes_of(trace(run, whole=True))
    block = of_tables(["forward | over | operation | bytes", "backward | over | operation | bytes"], run)
    outside = of_tables(["embedding and head | over | operation | bytes"], run)
    for line in block + outside:
        assert whole[line] == block[line] * run.model.num_hidden_layers + outside[line], line
    unnamed = {line for line in whole if line[0] in ("x", "y")} - set(block + outside)
    assert {purpose for _, _, purpose in unnamed} <= {
        "embed_positions: rows",
        "attention: keys and values",
        "gradients of norms and biases",
        "gradient norm",
        "lm_head: loss",
    }


# In this model, all sizes divide evenly. It is so wide that the weights of norms, which the formulas' W leaves out,
# vanish in rounding.
WIDE = {"preset": "llama-tiny", "hidden_size": 256, "head_dim": 32, "intermediate_size": 512}


ZERO = "`zero` | operation | over | bytes | bytes with z = 1 | what the step does"


def name_of(over: str, grid: ParallelConfig) -> str | None:
    """Return the trace's name for the axes in a cell. If some axes have size 1, it is the first name with the same
    ranks."""
    split = [axis for axis in over.split("·") if getattr(grid, axis) > 1]
    names = {"dp", "cp", "z", "dp_cp", "dp_z"}
    name = "_".join(split)
    return None if not split else name if name in names else "dp_cp_z"


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "grid",
    [
        {"x": 2, "z": 2, "dp": 2},
        pytest.param({"dp": 4}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "dp": 2}, marks=pytest.mark.slow),
        pytest.param({"cp": 2, "z": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_table_of_zero_says_what_the_trace_counts(zero: int, grid: dict[str, int]) -> None:
    run = tiny_run(WIDE, grid | {"zero": zero}, training={"global_batch_size": 16, "precision": "bf16"})
    said: Counter[tuple[str, str]] = Counter()
    for level, operation, over, formula, with_one, _ in TABLES[ZERO]:
        cell = formula if run.parallel.z > 1 else with_one
        if int(level) == zero and cell != "none" and (axis := name_of(over, run.parallel)) is not None:
            said[axis, operation] += formula_in(cell, **letters_of(run))
    counted: Counter[tuple[str, str]] = Counter()
    for (axis, operation, purpose), size in of_a_block(run).items():
        if purpose in ("weights", "gradients"):
            counted[axis, operation] += size
    assert counted.keys() == said.keys()
    for line, size in counted.items():
        assert size == pytest.approx(said[line], rel=4e-3), line


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("other", ["dp", "cp"])
def test_the_table_of_states_says_what_the_trace_counts(zero: int, other: str) -> None:
    run = tiny_run(WIDE, {"x": 2, "z": 2, other: 2, "zero": zero}, training={"global_batch_size": 8})
    memory = trace(run).memory
    rows = TABLES["`zero` | weights | gradients at the optimizer step | optimizer states | also needed during the step"]
    _, weights, gradients, optimizer, _ = rows[zero]
    for formula, size in (
        (weights, memory.parameters),
        (gradients, memory.gradients),
        (optimizer, memory.optimizer),
    ):
        assert size == pytest.approx(formula_in(formula, **letters_of(run)), rel=4e-3)


@pytest.mark.parametrize("axis", ["z", *(pytest.param(axis, marks=pytest.mark.slow) for axis in ("dp", "x", "y"))])
def test_the_intensity_of_an_axis_is_operations_over_bytes_sent(axis: str) -> None:
    run = tiny_run(WIDE, {axis: 4}, training={"global_batch_size": 16, "precision": "bf16"})
    letters = letters_of(run)
    operations = 6 * letters["A"] * letters["B"] * letters["S"] * letters["W"]
    sent = sum(
        size * 3 / 4 * (2 if operation == "all_reduce" else 1)
        for (over, operation, purpose), size in of_a_block(run).items()
        if over == axis and "norm" not in purpose
    )
    rows = {row[0].split()[0]: row[1] for row in TABLES["axis | FLOPs per byte sent | depends on"]}
    assert formula_in(rows[axis], **letters) == pytest.approx(operations / sent, rel=4e-3)


def width(model: ModelConfig) -> dict[str, int]:
    keys = model.num_key_value_heads * model.head_dim
    ups = model.intermediate_size * (2 if model.gated_mlp else 1)
    return {"H": model.hidden_size, "Q": model.num_attention_heads * model.head_dim, "K": keys, "U": ups,
            "F": model.intermediate_size}  # fmt: skip


def test_the_table_of_intensities_follows_from_the_formulas() -> None:
    formulas = {row[0].split()[0]: row[1] for row in TABLES["axis | FLOPs per byte sent | depends on"]}
    header = "model | x = 2 | x = 4 | x = 8 | y = 2 | y = 4"
    assert len(TABLES[header]) == 3
    for name, *numbers in TABLES[header]:
        letters = width(ModelConfig(**PRESETS[name.strip("`")])) | {"e": 2}
        for column, number in zip(header.split(" | ")[1:], numbers, strict=True):
            axis, size = column.split(" = ")
            assert formula_in(formulas[axis], **letters, **{axis: int(size)}) == pytest.approx(float(number), abs=0.5)
    page = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
    for z, number in re.findall(r"z = (\d+) (?:has an intensity )?of (\d+)", page):
        assert formula_in(formulas["z"], B=1, S=8192, e=2, g=4, z=int(z)) == pytest.approx(float(number), abs=0.5)


def test_the_table_of_two_axes_follows_from_its_formula() -> None:
    page = (REPOSITORY / "docs" / "parallelism.md").read_text(encoding="utf-8")
    formula = re.search(r"a rank sends (`[^`]+`) times e·B·S·H bytes", " ".join(page.split()))
    for ranks, *cells in TABLES["ranks | y = 1 | y = 2 | y = 4 | y = 8"]:
        for y, cell in zip((1, 2, 4, 8), cells, strict=True):
            if cell:
                value = formula_in(formula[1], H=1, Q=1, K=1, U=4, F=4, x=int(ranks) // y, y=y)
                assert value == pytest.approx(float(cell), abs=0.006), (ranks, y)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLES["x = 4 | x = y = 2 | y = 4 | one process"], ids=lambda row: row[0])
def test_the_table_of_activations_is_the_traces(row: list[str]) -> None:
    kept, *numbers = row
    modules = re.findall(r"\"(\w+)\"", kept)
    recompute = {"mode": "selective", "modules": modules} if modules else {"mode": "none"}
    for grid, number in zip(({"x": 4}, {"x": 2, "y": 2}, {"y": 4}, {}), numbers, strict=True):
        peaks = [
            trace(
                tiny_run(
                    {"preset": "llama3-8b", "num_hidden_layers": layers},
                    grid,
                    training={"global_batch_size": 1, "micro_batch_size": 1, "seq_length": 8192, "precision": "bf16"},
                    activation_checkpoint=recompute,
                ),
                whole=True,
            ).memory.activations_peak
            for layers in (4, 5)
        ]
        assert (peaks[1] - peaks[0]) / 2**20 == pytest.approx(float(number), abs=1)
