"""Every pair of settings occurs in a covering set of layouts, and each layout computes what one process computes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import torch
from low_precision import LIMIT, PrecisionError, precision_error
from pool import Pool
from tiny_runs import LLAMA, tiny_run

from fourfold.config.optimizer_rules import UpdateRule
from fourfold.config.run import ParallelConfig, PipelineSchedule, RunConfig
from fourfold.errors import UserError
from fourfold.verification.parity import parity
from fourfold.verification.parity_report import ParityReport


class Settings(NamedTuple):
    """One layout of at most 8 processes.

    ``accumulate`` means four micro-batches per step instead of one. ``per_node`` is ``overlap.shards_per_node``.
    ``experts`` is the number of ranks that share the experts, or 0 for dense MLPs. ``window`` is a number of tokens, or
    0 for no window.
    """

    x: int
    y: int
    z: int
    dp: int
    cp: int
    pp: int
    zero: int
    schedule: str
    recompute: str
    tied: bool
    kv_heads: int
    documents: bool
    accumulate: bool
    per_node: int
    experts: int
    optimizer: str
    window: int
    norms: str


CHOICES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("x", "y", "z", "dp", "cp", "pp"), (1, 2)),
    "zero": (0, 1, 2, 3),
    "schedule": get_args(PipelineSchedule),
    "recompute": ("none", "selective", "full"),
    "tied": (False, True),
    "kv_heads": (4, 8),
    "documents": (False, True),
    "accumulate": (False, True),
    "per_node": (1, 2),
    "experts": (0, 1, 2),
    "optimizer": get_args(UpdateRule),
    "window": (0, 5),
    "norms": ("before", "after", "around"),
}

CASES = [
    Settings(*row)
    for row in (
        (1, 1, 1, 1, 1, 1, 0, "1F1B", "full", False, 4, True, False, 1, 1, "lion", 5, "around"),
        (1, 1, 2, 2, 1, 2, 2, "GPipe", "selective", True, 8, False, True, 2, 2, "muon", 5, "after"),
        (2, 2, 1, 1, 2, 1, 3, "1F1B", "none", True, 8, False, True, 1, 0, "lion", 5, "after"),
        (1, 1, 1, 2, 2, 2, 1, "InterleavedZeroBubble", "none", False, 4, True, False, 2, 0, "adamw", 5, "before"),
        (2, 2, 1, 1, 1, 2, 0, "ZBVZeroBubble", "selective", False, 8, True, False, 2, 1, "adamw", 5, "around"),
        (1, 1, 2, 2, 1, 2, 3, "Interleaved1F1B", "full", True, 4, False, False, 2, 1, "muon", 0, "after"),
        (2, 1, 1, 1, 2, 2, 2, "LoopedBFS", "full", False, 4, True, True, 1, 2, "adamw", 5, "after"),
        (1, 2, 1, 2, 1, 2, 1, "DualPipeV", "full", True, 8, True, True, 2, 1, "lion", 5, "before"),
        (1, 2, 2, 1, 2, 1, 1, "1F1B", "selective", False, 4, False, False, 2, 2, "adamw", 0, "before"),
        (1, 1, 2, 2, 1, 2, 0, "LoopedBFS", "none", True, 4, False, False, 2, 0, "lion", 5, "after"),
        (1, 2, 1, 1, 2, 2, 0, "Interleaved1F1B", "selective", False, 8, True, True, 2, 2, "adamw", 5, "before"),
        (1, 2, 1, 1, 2, 2, 3, "GPipe", "selective", False, 4, True, False, 2, 1, "adamw", 5, "around"),
        (2, 1, 1, 2, 1, 2, 1, "ZBVZeroBubble", "full", True, 4, False, True, 1, 0, "muon", 5, "after"),
        (2, 2, 1, 1, 1, 2, 0, "InterleavedZeroBubble", "selective", True, 8, False, True, 1, 0, "lion", 0, "after"),
        (2, 1, 1, 1, 2, 2, 0, "DualPipeV", "none", False, 4, False, True, 1, 2, "muon", 0, "around"),
        (1, 2, 2, 2, 1, 1, 2, "1F1B", "none", False, 8, True, False, 2, 1, "muon", 0, "around"),
        (1, 2, 1, 2, 1, 2, 1, "LoopedBFS", "selective", True, 8, False, True, 2, 1, "muon", 5, "around"),
        (2, 1, 2, 1, 1, 2, 0, "GPipe", "full", True, 8, False, False, 1, 0, "lion", 5, "before"),
        (1, 1, 1, 1, 2, 2, 1, "ZBVZeroBubble", "none", False, 8, False, True, 2, 2, "lion", 0, "before"),
        (2, 1, 1, 2, 1, 2, 1, "Interleaved1F1B", "none", True, 4, True, True, 1, 0, "lion", 5, "around"),
        (1, 1, 1, 1, 2, 2, 1, "GPipe", "none", False, 4, False, False, 1, 0, "adamw", 0, "before"),
        (1, 1, 1, 1, 1, 2, 0, "1F1B", "full", False, 8, True, False, 1, 1, "muon", 0, "before"),
        (1, 1, 1, 1, 1, 2, 0, "InterleavedZeroBubble", "full", False, 8, True, False, 2, 1, "lion", 0, "after"),
        (1, 1, 1, 1, 1, 2, 0, "DualPipeV", "selective", True, 8, False, True, 1, 0, "adamw", 0, "after"),
        (1, 1, 1, 1, 2, 2, 2, "Interleaved1F1B", "none", True, 8, False, True, 1, 0, "lion", 0, "before"),
        (1, 1, 1, 1, 2, 2, 3, "LoopedBFS", "selective", True, 8, True, False, 1, 2, "lion", 0, "before"),
        (2, 1, 1, 1, 2, 2, 1, "InterleavedZeroBubble", "none", False, 8, False, False, 2, 2, "muon", 5, "around"),
    )
]

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(settings: Settings) -> set[Pair]:
    return set(itertools.combinations(settings._asdict().items(), 2))


def makes_no_sense(pair: Pair) -> bool:
    """Return whether this pair of settings is refused, or gives the same run as another pair."""
    values = dict(pair)
    split_backward = values.get("schedule") in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    return (
        (values.get("pp") == 1 and values.get("schedule", "1F1B") != "1F1B")
        or (split_backward and (values.get("z") == 2 or values.get("zero", 0) > 1))
        or (values.get("schedule") == "DualPipeV" and values.get("accumulate") is False)
    )


def run_of(settings: Settings, folder: str, precision: str = "fp32") -> RunConfig:
    s = settings
    model = LLAMA | {"num_hidden_layers": 4, "num_key_value_heads": s.kv_heads, "tie_word_embeddings": s.tied}
    model |= {"sliding_window": s.window, "norm_placement": s.norms}
    if s.experts:
        # In lower precision, route every token to all experts. Otherwise rounding could decide between two experts with
        # almost equal scores.
        chosen = 2 if precision == "fp32" else 4
        model |= {"num_experts": 4, "num_experts_per_tok": chosen, "moe_intermediate_size": 48}
    grid = {name: getattr(s, name) for name in ("x", "y", "z", "dp", "cp", "pp", "zero", "schedule")}
    grid |= {"ep": max(s.experts, 1)}
    batch = 2 * s.z * s.dp * (4 if s.accumulate else 1)
    return tiny_run(
        model,
        grid,
        training={"global_batch_size": batch, "precision": precision},
        data={"source": "python-stdlib", "mask_documents": s.documents},
        activation_checkpoint={"mode": s.recompute, "modules": ["attention", "mlp", "norms", "gathers"]},
        overlap={"shards_per_node": s.per_node},
        moe={"load_balancing_loss": 0.1, "z_loss": 0.001} if s.experts else {},
        optimizer={"name": s.optimizer},
        loss_scaling={"initial": 1024.0},
        output_dir=folder,
    )


def test_every_pair_of_settings_is_in_some_case() -> None:
    every = {
        ((a, value), (b, other))
        for a, b in itertools.combinations(CHOICES, 2)
        for value in CHOICES[a]
        for other in CHOICES[b]
    }
    covered = set().union(*(pairs_of(case) for case in CASES))
    print(f"{len(CASES)} cases cover {len(covered)} of {len(every)} pairs")
    assert all(makes_no_sense(pair) for pair in every - covered), sorted(map(str, every - covered))


def test_zero_bubble_schedules_refuse_what_they_cannot_do() -> None:
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        for grid in ({"z": 2}, {"dp": 2, "zero": 2}):
            with pytest.raises(UserError, match="schedule = '1F1B' or 'Interleaved1F1B' works"):
                tiny_run(LLAMA | {"num_hidden_layers": 4}, {"pp": 2, "schedule": schedule, **grid})


def parity_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    return parity(run, torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("settings", CASES, ids=lambda s: " ".join(map(str, s)))
def test_layout_computes_what_one_process_computes(pool: Pool, settings: Settings, tmp_path: Path) -> None:
    run = run_of(settings, str(tmp_path))
    report = pool.run(run.parallel.world_size, parity_body, run)[0]
    assert report.ok, report


def precision_body(rank: int, world_size: int, run: RunConfig) -> PrecisionError | None:
    return precision_error(run, torch.device("cpu"), steps=8)


PRECISIONS = [("bf16", "fp16")[number // 3 % 2] for number in range(len(CASES))]


def test_every_setting_is_in_some_case_of_each_precision() -> None:
    in_cases = {(p, *each) for p, case in zip(PRECISIONS, CASES, strict=True) for each in case._asdict().items()}
    every = {(p, name, value) for p in ("bf16", "fp16") for name, values in CHOICES.items() for value in values}
    assert in_cases == every


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "precision"),
    [*zip(CASES, PRECISIONS, strict=True)],
    ids=[" ".join(map(str, (p, *case))) for p, case in zip(PRECISIONS, CASES, strict=True)],
)
def test_lower_precision_only_rounds(pool: Pool, settings: Settings, precision: str, tmp_path: Path) -> None:
    """The grid's error relative to float64 is at most 1.5 times the error of one process in the same precision."""
    run = run_of(settings, str(tmp_path), precision)
    alone = run.model_copy(update={"parallel": ParallelConfig()})
    grid, one = (pool.run(r.parallel.world_size, precision_body, r)[0] for r in (run, alone))
    assert grid.gradients < LIMIT * one.gradients
    assert grid.weights < LIMIT * one.weights
    assert grid.loss < 4 * LIMIT * one.loss, "one number a step: each a mean of eight squares"
