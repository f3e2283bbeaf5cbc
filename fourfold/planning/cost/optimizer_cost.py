"""Compute the time of the optimizer step, the memory that this step needs in addition to the optimizer states, and the
size of a checkpoint.

Muon distributes matrices over the ranks of a pipeline stage, and each rank orthogonalizes full matrices
(``training.owned_matrices``).
"""

from functools import reduce
from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Flag, Number
from fourfold.planning.cost.expert_sizes import has_experts, states_of_experts
from fourfold.planning.cost.rates import Rates
from fourfold.planning.cost.terms.exchange import exchange_seconds
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.model_shape import ModelShape
from fourfold.planning.workload import OPTIMIZERS, Workload

STEPS = 5
"""Number of Newton-Schulz iterations that Muon runs to orthogonalize a matrix."""

MOVED_BYTES = {"adamw": 34.0, "muon": 68.0, "lion": 78.0}
"""Bytes that the optimizer step moves through memory per weight entry.

AdamW is one kernel. It reads and writes the fp32 weight and two moments (24 bytes), reads the gradient for the norm and
for the update (8), and writes the 16-bit copy (2). For Muon and Lion, the count includes every operation that reads or
writes a weight, its moment, its gradient, or its update.
"""

AVERAGE_BYTES = 4
"""Bytes per entry of the moving average of the weights."""


class Matrices(NamedTuple):
    """Matrices of the same shape in one pipeline rank's layers: their number, their shorter side, and their longer
    side."""

    number: Number
    short: Number
    long: Number

    @property
    def entries(self) -> Number:
        """Return the number of entries of one matrix."""
        return self.short * self.long

    @property
    def flops(self) -> Number:
        """Return the FLOPs of the Newton–Schulz iterations of one matrix x. Each iteration computes x·xᵀ, squares it,
        and multiplies x by a combination of x·xᵀ and its square."""
        return STEPS * (4.0 * self.short**2 * self.long + 2.0 * self.short**3)


def is_named(work: Workload, name: str) -> Flag:
    """Return whether the step's optimizer has this name."""
    return np.equal(work.step.optimizer, OPTIMIZERS.index(name))


def entries_without_second_moment(work: Workload, blocks: Number, rest: Number) -> Number:
    """Return the number of weight entries for which the optimizer stores one moment. (AdamW stores two moments for
    every entry.)

    Args:
        work: Model and optimizer of the step.
        blocks: Number of blocks. The weights of their experts are not counted.
        rest: Number of weight entries outside the blocks, such as embeddings.
    """
    if not np.any(work.step.optimizer):
        return 0
    model = work.model
    router = model.hidden_size * model.num_experts * model.sparse
    return np.where(
        is_named(work, "lion"),
        blocks * model.block_weights + rest,
        np.where(is_named(work, "muon"), blocks * (model.block_weights - router), 0),
    )


def matrices_of(work: Workload, layers: Number) -> list[Matrices]:
    """Return the matrices that Muon updates in ``layers`` layers, including the matrices of experts."""
    model, hidden = work.model, work.model.hidden_size
    dense, sparse = layers * (1 - model.sparse), layers * model.sparse
    ups = model.gate_up / np.maximum(model.intermediate_size, 1)
    each = np.where(model.has_latents, layers, 0)
    plain, linear = (layers - each) * (1 - model.linear), layers * model.linear

    def kind(number: Number, width: Number, other: Number = hidden) -> Matrices:
        return Matrices(np.where(np.greater(width, 0), number, 0), np.minimum(width, other), np.maximum(width, other))

    return [
        *(kind(each, width, other) for width, other in _of_latents(model)),
        kind((2 + model.output_gate) * plain, model.queries),
        kind(2 * plain, model.keys),
        kind(3 * linear, model.linear_values),
        kind(2 * linear, model.linear_keys),
        kind(2 * linear, model.linear_num_value_heads),
        kind((ups + 1) * dense, model.intermediate_size),
        kind(3 * sparse, model.shared_expert_intermediate_size),
        kind(3 * sparse * model.num_experts, model.moe_intermediate_size),
    ]


def _of_latents(model: ModelShape) -> list[tuple[Number, Number]]:
    """Return the output width and the input width of each matrix of latent attention."""
    turned = model.queries * model.rotary_share
    of_queries = np.where(np.greater(model.q_latent, 0), model.q_latent, model.hidden_size)
    return [
        *((width, model.hidden_size) for width in (model.q_latent, model.kv_latent, model.shared_key, model.values)),
        *((width, of_queries) for width in (turned, model.queries - turned)),
        *((width, model.kv_latent) for width in (model.queries - turned, model.values)),
    ]


def muon_seconds(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Return the seconds that a rank needs to orthogonalize its share of a stage's matrices for Muon, and to send and
    receive matrices. Return 0 for other optimizers.

    A rank orthogonalizes full matrices, so the time is at least the time of the largest matrix.
    """
    if not np.any(is_named(work, "muon")):
        return 0.0
    layout, kinds = work.layout, matrices_of(work, work.model.num_hidden_layers / work.layout.pp)
    ranks = layout.gpus / layout.pp
    flops = sum(kind.number * kind.flops for kind in kinds)
    most = np.maximum.reduce([np.where(kind.number > 0, kind.flops, 0) for kind in kinds])
    matmuls = np.maximum(flops / ranks, most) / Rates(work, machine, constants).head
    entries = sum(kind.number * kind.entries for kind in kinds)
    turns = _turns(kinds, ranks)
    units = sum(np.minimum(turn * ranks, kind.number) for kind, turn in zip(kinds, turns, strict=True))
    exchanges = 2 * np.maximum(np.ceil(units / ranks), 1)
    copies = np.where(layout.zero > 0, 1, layout.dp * layout.cp)
    size = work.step.item_bytes * entries / ranks * (1 + copies)
    sending = exchanges * exchange_seconds(size / exchanges, 1.0, False, ranks, 1, machine, constants)
    return np.where(is_named(work, "muon"), matmuls + sending, 0.0)


def muon_workspace(work: Workload, layers: Number) -> Number:
    """Return the bytes that Muon needs in addition to its states, on the rank that orthogonalizes the most matrices at
    once.

    During the iterations, a rank holds its matrices, the matrices divided by their norms, x·xᵀ, and either the square
    of x·xᵀ or the next x. Afterwards, it holds the updates that it sends to all replicas, and the updates that it
    receives. Both have the same size.
    """
    if not np.any(is_named(work, "muon")):
        return 0
    layout, kinds = work.layout, matrices_of(work, layers)
    ranks = layout.gpus / layout.pp
    copies = np.where(layout.zero > 0, 1, layout.dp * layout.cp)
    held = sum(kind.number * kind.entries for kind in kinds) / (layout.x * layout.y)
    needs = []
    for kind, turns in zip(kinds, _turns(kinds, ranks), strict=True):
        together = np.ceil(kind.number / np.maximum(ranks * turns, 1))
        x, gram = together * kind.entries, together * kind.short**2
        needs += [2 * x + 2 * gram, 3 * x + gram, np.where(ranks > 1, 2 * np.minimum(copies * x, held), 0)]
    return np.where(is_named(work, "muon"), work.step.item_bytes * np.maximum.reduce(needs), 0)


def lion_workspace(work: Workload, layers: Number, tables: Number) -> Number:
    """Return the bytes that Lion needs in addition to its states while it updates the largest shard of a weight.

    These bytes hold the update, its magnitude, and a copy of the gradient if the gradient is cast to the moment's
    dtype. ``tables`` is the number of entries of the largest weight outside the blocks.
    """
    if not np.any(is_named(work, "lion")):
        return 0
    layout = work.layout
    matrices = (np.where(kind.number > 0, kind.entries, 0) for kind in matrices_of(work, layers))
    largest = reduce(np.maximum, matrices, tables)
    entries = largest / (layout.x * layout.y * layout.shards)
    moment = work.step.moment_bytes
    cast = np.maximum(work.step.reduce_bytes, work.step.weight_bytes) != moment
    return np.where(is_named(work, "lion"), np.where(cast, 3, 2) * moment * entries, 0)


def _turns(kinds: list[Matrices], ranks: Number) -> list[Number]:
    """Return the number of units per rank for each shape of matrices. A *unit* is a group of matrices of the same shape
    that a rank orthogonalizes together. A unit has at most as many entries as the largest matrix of all shapes."""
    largest = np.maximum.reduce([np.where(kind.number > 0, kind.entries, 0) for kind in kinds])
    limits = [np.maximum(largest // np.maximum(kind.entries, 1), 1) for kind in kinds]
    return [np.ceil(kind.number / (ranks * limit)) for kind, limit in zip(kinds, limits, strict=True)]


def moved_bytes(work: Workload) -> Number:
    """Return the bytes that the optimizer step moves through memory per weight entry that a rank updates.

    A moving average adds a read and a write of the average, and one more read of the weight.
    """
    moved: Number = np.array([MOVED_BYTES[name] for name in OPTIMIZERS])[np.asarray(work.step.optimizer, int)]
    return moved + np.where(work.step.averaged, 2 * AVERAGE_BYTES + work.step.weight_bytes, 0)


def saved_bytes(work: Workload, parameters: Number) -> Number:
    """Return the bytes of a checkpoint of a model with ``parameters`` parameters. A checkpoint has the weights, the
    optimizer moments, and the moving average of the weights if the run has one."""
    model, step = work.model, work.step
    rest = parameters - model.num_hidden_layers * (model.block_weights + model.expert_weights)
    single = entries_without_second_moment(work, model.num_hidden_layers, rest)
    if has_experts(work):
        single = single + entries_without_second_moment(states_of_experts(work), model.num_hidden_layers, 0)
    average = np.where(step.averaged, AVERAGE_BYTES, 0)
    return parameters * (step.weight_bytes + 2 * step.moment_bytes + average) - step.moment_bytes * single
