"""A whole training loop on a parallelized model: packed documents, accumulation, gradient checkpointing, Adam, and a
checkpoint that another grid resumes. The result equals one process in float64 that trains on each document
separately."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mutation import mutated
from parallelized_models import FAMILIES, make
from pool import Pool
from torch import Tensor, nn

import fourfold
from fourfold.config.run import ParallelConfig
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.verification.deviation import deviation, deviations

STEPS, SAVED_AFTER, MICRO_BATCHES, LARGEST_NORM = 3, 2, 2, 0.5
LIMIT = 10.0
"""Largest allowed error of the grid, relative to the error of one process in float32. Parity has the same limit."""
LENGTHS = ((16,), (1, 15), (7, 9), (3, 4, 9))
"""Lengths of the documents in a sequence."""
UNPACKED = {"gpt_oss", "minimax"}
"""In these models, packed documents attend to each other. So the tests train them with one document per sequence."""
PAIRS = (
    ({"x": 2, "z": 2}, {"y": 2, "dp": 2}),
    ({"y": 2, "z": 2, "zero": 3}, {"x": 2, "y": 2}),
    ({"x": 2, "dp": 2}, {"z": 2, "dp": 2, "zero": 1}),
    ({"x": 2, "y": 2}, {"z": 4}),
)
"""The grid of the first two steps, and the grid that resumes."""

WITHOUT_PLAN = {"openai_gpt"}
"""Models that need rules."""


class Trained(NamedTuple):
    losses: list[Tensor]
    norms: list[Tensor]
    weights: dict[str, Tensor]


def lengths_of(name: str, row: int) -> tuple[int, ...]:
    return (16,) if name in UNPACKED else LENGTHS[row % 4]


def batch_of(name: str, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels, and positions [8, 16]. Documents have at least one token, and labels are masked
    unevenly."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(4, 200, (8, 16), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths_of(name, row)]) for row in range(8)])
    labels = tokens.clone()
    labels[:, 1:][positions[:, 1:] == 0] = -100  # The first token of a document is never a target.
    for row in range(8):
        labels[row, 1 : 2 * ((row + step) % 7)] = -100
    labels[step] = -100  # one sequence has no labels
    return tokens, labels, positions


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    # Use a large eps. Otherwise rounding errors in near-zero gradients would become updates of full size.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def on_one_process(name: str, dtype: torch.dtype) -> Trained:
    """Train the original model on each document alone."""
    model = make(name).to(dtype)
    model.set_experts_implementation("eager")  # torch's grouped matmuls do not support float64
    optimizer, losses, norms = optimizer_of(model), list[Tensor](), list[Tensor]()
    for step in range(STEPS):
        tokens, labels, _ = batch_of(name, step)
        kept, total = (labels[:, 1:] != -100).sum(), torch.zeros((), dtype=dtype)
        for row in range(8):
            begin = 0
            for length in lengths_of(name, row):
                document = slice(begin, begin + length)
                logits = model(input_ids=tokens[row : row + 1, document], use_cache=False).logits[0]
                targets = labels[row, document][1:]
                total = total + nn.functional.cross_entropy(logits[:-1], targets, reduction="sum")
                begin += length
        (total / kept).backward()
        losses.append((total / kept).detach())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM))
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: weight.detach() for name, weight in model.named_parameters()})


def trained_body(
    rank: int, world_size: int, name: str, grid: dict[str, int], folder: Path, resumes: bool, fault: str | None
) -> Trained | None:
    """Take the steps before the checkpoint and write it, or read it and take the remaining steps."""
    with nullcontext() if fault is None else mutated(*FAULTS[fault]):
        return train(name, grid, folder, resumes)


def train(name: str, grid: dict[str, int], folder: Path, resumes: bool) -> Trained | None:
    untouched = make(name)
    untouched.gradient_checkpointing_enable()
    model = fourfold.parallelize(untouched, Grid(ParallelConfig(**grid), "cpu"))
    optimizer, losses, norms = optimizer_of(model), list[Tensor](), list[Tensor]()
    if resumes:
        model.load(folder, optimizer)
    for step in range(SAVED_AFTER, STEPS) if resumes else range(SAVED_AFTER):
        tokens, labels, positions = batch_of(name, step)
        parts = [[model.rows(part) for part in each.chunk(MICRO_BATCHES)] for each in (tokens, labels, positions)]
        kept = sum(model.count(part) for part in parts[1])
        loss = torch.zeros(())
        for index, (part, part_labels, part_positions) in enumerate(zip(*parts, strict=True)):
            out = model(part, position_ids=part_positions, labels=part_labels, num_items_in_batch=kept)
            model.backward(out.loss, last=index == MICRO_BATCHES - 1)
            loss += out.loss.detach()
        losses.append(loss)
        norms.append(model.clip_grad_norm_(LARGEST_NORM))
        optimizer.step()
        optimizer.zero_grad()
    if not resumes:
        model.save(folder, optimizer)
    weights = model.gather()
    return None if weights is None else Trained(losses, norms, weights)


def worst_ratio(
    pool: Pool, name: str, pair: tuple[dict[str, int], dict[str, int]], folder: Path, fault: str | None = None
) -> float:
    first, second = (
        pool.run(ParallelConfig(**grid).world_size, trained_body, name, grid, folder / "saved", bool(resumes), fault)[0]
        for resumes, grid in enumerate(pair)
    )
    one, exact = (on_one_process(name, dtype) for dtype in (torch.float32, torch.float64))
    found = deviations(second.weights, one.weights, exact.weights)
    for quantity in ("losses", "norms"):
        grid = [*getattr(first, quantity), *getattr(second, quantity)]
        found += [
            deviation(f"{quantity} {step}", *each)
            for step, each in enumerate(zip(grid, getattr(one, quantity), getattr(exact, quantity), strict=True))
        ]
    return max(each.ratio for each in found)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in WITHOUT_PLAN])
def test_a_training_loop_computes_what_one_process_computes(pool: Pool, name: str, tmp_path: Path) -> None:
    pair = PAIRS[list(FAMILIES).index(name) % len(PAIRS)]
    assert worst_ratio(pool, name, pair, tmp_path) < LIMIT


def refused_body(rank: int, world_size: int, name: str) -> None:
    model = fourfold.parallelize(make(name), Grid(ParallelConfig(x=2), "cpu"))
    tokens, labels, positions = batch_of("llama", 0)
    with pytest.raises(UserError, match="put one document in each row"):
        model(tokens, position_ids=positions, labels=labels)
    assert model(tokens, position_ids=torch.arange(16).expand(8, 16), labels=labels).loss > 0


@pytest.mark.parametrize("name", sorted(UNPACKED))
def test_packed_documents_that_see_each_other_are_refused(pool: Pool, name: str) -> None:
    pool.run(2, refused_body, name)


PARALLELIZED = "fourfold.huggingface.parallelized:Parallelized"
FAULTS = {
    "a process counts its own tokens": (
        f"{PARALLELIZED}.count",
        "all_reduce((labels[..., 1:] != IGNORE_INDEX).sum(), self.grid.tokens, 'kept tokens')",
        "(labels[..., 1:] != IGNORE_INDEX).sum()",
    ),
    "first labels count though no token predicts them": (f"{PARALLELIZED}.count", "labels[..., 1:]", "labels"),
    "the loss is of one process": (
        f"{PARALLELIZED}.total",
        "all_reduce(share.detach().clone(), self.grid.tokens, 'loss')",
        "share.detach().clone()",
    ),
    "all processes take the first sequences": (
        f"{PARALLELIZED}.rows",
        "batch.chunk(axis.size)[axis.rank]",
        "batch.chunk(axis.size)[0]",
    ),
    "gradients of norms stay partial": (
        "fourfold.parallel.grid_model:GridModel.finish_gradients",
        "sum_partial_gradients(self.shards, self.grid)",
        "pass",
    ),
    "the gradient norm counts replicas": (
        "fourfold.parallel.state:clip_gradients",
        "1.0 / shard.replicas",
        "1.0",
    ),
    "a checkpoint is read without the optimizer's state": (
        "fourfold.huggingface.parallelized_files:read_checkpoint",
        "_parts(shards, optimizer)",
        "_parts(shards, None)",
    ),
    "Adam counts steps from the checkpoint on": (
        "fourfold.huggingface.parallelized_files:_make_state",
        "torch.tensor(value)",
        "torch.tensor(0.0)",
    ),
    "input gradients stay partial over x": (
        "fourfold.parallel.other_models.whole_residual:Entrance.__call__",
        "x_BSh = sum_gradient(x_BSh, self.x, f'{self.name}: input gradient')",
        "pass",
    ),
    "outputs stay partial over x": (
        "fourfold.parallel.other_models.whole_residual:leave",
        "sum_of(partial_BSh, grid.x, f'{name}: outputs')",
        "partial_BSh",
    ),
    "gradients of the router stay partial": (
        "fourfold.parallel.other_models.split_experts:split_experts",
        "weights_NK = sum_gradient(weights_NK, over_both, f'{name}: router gradient')",
        "pass",
    ),
    "experts take tokens of other ranks": (
        "fourfold.parallel.other_models.split_experts:split_experts",
        "chosen_NK - first",
        "chosen_NK",
    ),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_seen(pool: Pool, fault: str, tmp_path: Path) -> None:
    name = "qwen3_moe" if "router" in fault or "experts" in fault else "qwen3"
    assert worst_ratio(pool, name, PAIRS[0], tmp_path, fault) > 2 * LIMIT
