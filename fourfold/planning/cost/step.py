"""Compute the time of a training step, split into parts."""

from typing import NamedTuple

import numpy as np

from fourfold.planning.array_fields import Number
from fourfold.planning.cost.block_time import BlockTime, block_time
from fourfold.planning.cost.expert_sizes import has_experts, states_of_experts
from fourfold.planning.cost.exposed import (
    exposed_cp,
    exposed_ep,
    exposed_gradient_sum,
    exposed_pp,
    exposed_x_and_y,
    exposed_z,
    forwards_again,
    hidden,
)
from fourfold.planning.cost.gathered_weights import is_replicated
from fourfold.planning.cost.optimizer_cost import moved_bytes, muon_seconds
from fourfold.planning.cost.stage_split import split_of
from fourfold.planning.cost.terms.bubble import bubble_seconds
from fourfold.planning.cost.terms.host import BLOCKING, OPTIMIZER_KERNELS, overlapped
from fourfold.planning.cost.weight_traffic import WeightTraffic, gathered_once_a_step, weight_traffic
from fourfold.planning.machines.constants import Constants
from fourfold.planning.machines.machine import Machine
from fourfold.planning.workload import Workload

PARTS = (
    "compute", "recompute", "x", "y", "z", "cp", "ep", "dp", "pp", "bubble", "logits", "launch", "optimizer", "other",
)  # fmt: skip
"""Names of the parts that the time of a step is split into. *Exposed* communication is communication that no
computation hides.

- compute: computation of the blocks.
- recompute: computation that the backward pass repeats, and exposed copies of block inputs to and from host memory.
- x, y, z, cp, ep, dp, pp: exposed communication over the axis of the same name.
- bubble: time that a pipeline rank waits for other pipeline ranks.
- logits: computation of the head and the loss. If pp = 1, also computation and communication over x of the embedding.
- launch: time that the device waits for the host to launch kernels.
- optimizer: the optimizer step.
- other: time that every step takes, regardless of its size.

If weights are sharded over z · dp · cp ranks, weights are gathered and gradients are scattered over the three axes
together. The part z is then the time that this communication would take over z alone, and the part dp has the remaining
time.
"""


class _Layer(NamedTuple):
    """Seconds of one block for one micro-batch, by part of the step (``PARTS``). ``offload`` is the exposed time of
    copies to and from host memory."""

    compute: Number
    recompute: Number
    x: Number
    y: Number
    cp: Number
    ep: Number
    offload: Number
    launch: Number = 0.0
    z: Number = 0.0
    z_first: Number = 0.0
    """Additional seconds for the rank's first block. No earlier block hides this block's weight gather in the forward
    pass. No later computation hides this block's gradient scatter at the end of the backward pass."""

    @property
    def total(self) -> Number:
        return self.device + self.launch + self.z

    @property
    def device(self) -> Number:
        return self.compute + self.recompute + self.x + self.y + self.cp + self.ep + self.offload


class _Ends(NamedTuple):
    """Seconds of head and embedding for one micro-batch.

    - head: total time of the head and the loss.
    - embedding: total time of the embedding.
    - table: time to move the head's weight and its gradient through device memory. The embedding's weight and its
      gradient take as long.
    - z_head: exposed time to gather the head's weight and to scatter its gradient.
    - z_embedding: the same time for the embedding's weight.
    """

    head: Number
    embedding: Number
    table: Number
    z_head: Number
    z_embedding: Number


def step_parts(
    work: Workload, machine: Machine, constants: Constants, block: BlockTime | None = None,
    traffic: WeightTraffic | None = None,
) -> dict[str, Number]:  # fmt: skip
    """Return the seconds of each part of a step, by the part's name in ``PARTS``. The parts add up to the step time.

    Args:
        work: Model, layout, batch, and training framework of the step.
        machine: Rates, memory, and links of the machine.
        constants: How close training gets to the machine's rates.
        block: Result of ``block_time``. If None, this function computes it.
        traffic: Result of ``weight_traffic``. If None, this function computes it.
    """
    layout = work.layout
    block = block_time(work, machine, constants) if block is None else block
    traffic = weight_traffic(work, machine, constants) if traffic is None else traffic
    layer, ends = _layer(work, machine, constants, block, traffic), _ends(work, machine, constants, block, traffic)
    several = layout.pp > 1
    # Compute the time of an average pipeline rank, which has 1/pp of the layers and of the head's work. With pp > 1,
    # the embedding is not included. The time during which a rank has no work is part of the bubble.
    layers, head_passes = work.micro_batches * _mean_layers(work), work.micro_batches / layout.pp
    z_layers = layers * layer.z + work.micro_batches * layer.z_first
    z_of_ends = head_passes * (ends.z_head + np.where(several, 0.0, ends.z_embedding))
    z = z_layers * traffic.of_z + z_of_ends * traffic.table_of_z
    logits = block.head + (1 + work.model.predictions) * ends.table
    logits = logits + np.where(several, 0.0, block.embedding + ends.table)
    slowdown = _slowdown(work, machine, constants)
    parts = {
        "compute": layers * layer.compute * slowdown,
        "recompute": layers * (layer.recompute * slowdown + layer.offload),
        "x": layers * layer.x + head_passes * block.head_x,
        "y": layers * layer.y + head_passes * block.head_y,
        "z": z,
        "cp": layers * layer.cp,
        "ep": layers * layer.ep,
        "dp": _gradient_sum(work, constants, block, traffic) + (z_layers + z_of_ends - z),
        "pp": exposed_pp(work, machine, constants),
        "bubble": _bubble(work, block, layer, ends),
        "logits": head_passes * logits * slowdown,
        "launch": layers * layer.launch,
        "optimizer": _optimizer(work, machine, constants),
        "other": constants.step,
    }
    assert tuple(parts) == PARTS
    return parts


def step_seconds(work: Workload, machine: Machine, constants: Constants, block: BlockTime | None = None) -> Number:
    """Return the seconds of a step. ``block`` is the result of ``block_time``, if it is already computed."""
    return sum(step_parts(work, machine, constants, block).values())


def _slowdown(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Return the computation time of the slowest device, divided by the mean over all devices. All devices wait for the
    slowest one.

    If the spread of the machine's devices was not measured (``Machine.spread`` is 0), use the spread of its nodes
    (``Constants.dispersion``).
    """
    gpus = work.layout.gpus
    of_nodes = constants.dispersion * slowest_of(gpus / machine.gpus_per_node)
    return 1 + np.where(np.greater(machine.spread, 0), machine.spread * slowest_of(gpus), of_nodes)


def slowest_of(count: Number) -> Number:
    """Return by how many standard deviations the slowest of n = ``count`` devices is expected to be slower than the
    mean. The result is √(2 ln n), the approximate expected maximum of n standard normal variables (Cramér 1946, section
    28.6)."""
    deviations: Number = np.sqrt(2 * np.log(np.maximum(count, 1)))
    return deviations


def _layer(work: Workload, machine: Machine, constants: Constants, block: BlockTime, traffic: WeightTraffic) -> _Layer:
    """Return the seconds of one block for one micro-batch, by part."""
    for_weights = work.block_weights * _seconds_for_a_weight(work, machine, constants)
    if has_experts(work):
        of_experts = _seconds_for_a_weight(states_of_experts(work), machine, constants)
        for_weights = for_weights + work.model.expert_weights * of_experts
    x, y = exposed_x_and_y(work, machine, constants, block)
    layer = _Layer(
        compute=block.forward + block.backward + for_weights,
        recompute=_recompute(work, block),
        x=x,
        y=y,
        cp=exposed_cp(work, machine, constants, block),
        ep=exposed_ep(work, constants, block),
        offload=_offload(work, machine, constants, block),
    )
    launch = _launch(work, block, layer.device)
    z = exposed_z(work, constants, traffic.block, layer.device + launch)
    z_first = np.where(work.program.is_fourfold, traffic.outermost * (1 - z / np.maximum(traffic.block, 1e-30)), 0.0)
    return layer._replace(launch=launch, z=z, z_first=z_first)


def _offload(work: Workload, machine: Machine, constants: Constants, block: BlockTime) -> Number:
    """Return the exposed seconds of copying a block's input to host memory and back (``parallel.memory.offload``), as a
    mean over all blocks.

    The block's forward pass runs during the copy to host memory, and hides this copy. The recomputation and the
    backward pass of the following block hide the copy back.
    """
    layout = work.layout
    residual = work.step.item_bytes * work.tokens * work.model.hidden_size / (layout.x * layout.y)
    # ``machine.host`` is 0 if the machine file does not give this rate. The search refuses offload on such machines, so
    # only avoid a division by 0.
    copy = residual / np.maximum(machine.host, 1.0)
    beside = (block.forward, block.forward + block.backward)
    seconds = sum(copy - hidden(copy, computing, constants.exposed) for computing in beside)
    return np.where((layout.recompute == 2) & layout.offload, seconds * layout.recomputing, 0.0)


def _recompute(work: Workload, block: BlockTime) -> Number:
    """Return the seconds of computation that the backward pass of one block repeats, as a mean over all blocks."""
    layout, program = work.layout, work.program
    selected = np.where(program.recomputes_attention, block.attention_forward, 0.0)
    selected = selected + np.where(program.recomputes_mlp, block.activation_forward, 0.0)
    selected = np.where(program.recomputes_per_op, (block.forward - block.attention_forward) / 2, selected)
    whole = block.forward - np.where(program.recompute_stops_early, block.last_matmul, 0.0)
    again = np.where(layout.recompute == 2, whole, np.where(layout.recompute == 1, selected, 0.0))
    return again * layout.recomputing + block.linear_forward * (1 - forwards_again(work))


def _launch(work: Workload, block: BlockTime, device: Number) -> Number:
    """Return the seconds that the device waits, per block, for the host to launch kernels.

    Before the host can launch the experts' matmuls, it must read each expert's number of rows (tokens) from the device.
    So no launches are queued at that point. Therefore only the experts' computation hides the launches of the experts,
    and all other computation hides all other launches. If a framework other than fourfold limits the rows of an expert
    (``Step.capacity``), it pads every expert's rows to this limit, so the host knows the number in advance.
    """
    again, program, experts = forwards_again(work), work.program, block.experts
    of_core = block.linear_launch * (1 - again)
    host = (block.launch_forward * (1 + again) + block.launch_backward + of_core) * (1 - program.captured)
    if not has_experts(work):
        return np.where(program.blocking, BLOCKING * host, overlapped(device, host) - device)
    of_experts = experts.forward * (1 + again) + experts.backward
    own = (experts.launch * (1 + again) + experts.launch_backward) * (1 - program.captured_experts)
    rest = device - of_experts
    waits = overlapped(rest, host) - rest + overlapped(of_experts, own) - of_experts
    knows = (work.step.capacity > 0) & ~np.asarray(program.is_fourfold, bool)
    waits = np.where(knows, overlapped(device, host + own) - device, waits)
    return np.where(program.blocking, BLOCKING * (host + own), waits)


def _ends(work: Workload, machine: Machine, constants: Constants, block: BlockTime, traffic: WeightTraffic) -> _Ends:
    """Return the seconds of head and embedding for one micro-batch, on the pipeline ranks that have the head or the
    embedding."""
    model = work.model
    table = model.padded_vocab_size * model.hidden_size * _seconds_for_a_weight(work, machine, constants)
    # Each prediction layer gathers the embedding and its own projections.
    gathers = 1 + model.predictions + model.projections_per_head
    z_head = exposed_z(work, constants, gathers * traffic.table, block.head)
    shared = np.asarray(model.tie_word_embeddings, bool) & (work.layout.pp == 1)
    # No computation hides the gather of the embedding's weight.
    z_embedding = np.where(shared, 0.0, traffic.table)
    head = block.head + (1 + model.predictions) * table + block.head_x + block.head_y + z_head
    return _Ends(head, block.embedding + table + z_embedding, table, z_head, z_embedding)


def _mean_layers(work: Workload) -> Number:
    return work.model.num_hidden_layers / work.layout.pp


def _bubble(work: Workload, block: BlockTime, layer: _Layer, ends: _Ends) -> Number:
    """Return the seconds that an average rank is idle: the bubble that the schedule has with equal stages, plus the
    time that the rank waits for the slowest rank."""
    layout, micro_batches, layers = work.layout, work.micro_batches, _mean_layers(work)
    share = (ends.head + ends.embedding) / layout.pp
    weights = layers * block.weight_gradients + block.head / (3 * layout.pp)
    forward = (
        layers * (block.forward + block.x_forward + block.y_forward + block.experts.ep + layer.launch / 3) + share / 3
    )
    rest = layers * layer.total + share - forward - weights
    equal = bubble_seconds(layout.schedule, layout.pp, layout.stages_per_rank, micro_batches, forward, rest, weights)
    behind = _slowest_rank(work, layer, ends) - layers * layer.total - ends.head / layout.pp
    return equal + np.where(layout.pp > 1, micro_batches * behind, 0.0)


def _slowest_rank(work: Workload, layer: _Layer, ends: _Ends) -> Number:
    """Return the seconds of one micro-batch on the slowest pipeline rank. This is the rank with the most blocks, the
    rank with the head, or the first rank. (The head is on the last rank, or on the first rank in V-shaped
    schedules.)"""
    split, v_shaped = split_of(work), work.layout.v_shaped
    at_the_end = np.where(v_shaped, 0.0, ends.head)
    at_the_start = np.where(v_shaped, ends.head, 0.0)
    slowest = np.maximum(split.most * layer.total, split.last.number * layer.total + at_the_end)
    return np.maximum(slowest, split.first.number * layer.total + at_the_start)


def _gradient_sum(work: Workload, constants: Constants, block: BlockTime, traffic: WeightTraffic) -> Number:
    """Return the seconds of the traffic that occurs once per step (``WeightTraffic.gradients``), not counting the
    seconds that the step's last backward pass hides."""
    last_backward = _mean_layers(work) * (block.backward + _recompute(work, block))
    return exposed_gradient_sum(work, constants, traffic.gradients, last_backward)


def _optimizer(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Return the seconds of the optimizer step on a rank's shard of the weights."""
    stepped = _entries_stepped(work)
    if has_experts(work):
        stepped = stepped + _entries_stepped(states_of_experts(work))
    step = work.step
    moving = stepped * moved_bytes(work) / (constants.memory * machine.memory_bandwidth)
    # If the optimizer runs on the host, gradients are copied to the host and weights are copied back.
    copied = stepped * (step.reduce_bytes + step.item_bytes) / np.maximum(machine.host, 1.0)
    seconds = np.where(work.program.offloads_optimizer, copied, moving)
    kernels = OPTIMIZER_KERNELS * constants.launch * machine.launch
    return seconds + kernels + muon_seconds(work, machine, constants)


def _entries_stepped(work: Workload) -> Number:
    """Return the number of weight entries that the optimizer updates on one rank. Entries of experts are not
    counted."""
    layout = work.layout
    held = work.model.num_hidden_layers * work.block_weights / layout.pp + work.table_weights
    return held / (layout.x * layout.y * layout.shards)


def _seconds_for_a_weight(work: Workload, machine: Machine, constants: Constants) -> Number:
    """Return the seconds per micro-batch and weight entry that a rank needs to move weights and gradients through
    device memory.

    The seconds are a mean over the micro-batches of a step. The entries are the entries of the full weight, before x
    and y split it. If a rank holds unsharded gradients, it casts or copies the gradient of the first micro-batch, and
    adds the gradients of later micro-batches to the copy.
    """
    step, program = work.step, work.program
    item, reduced = step.item_bytes, step.reduce_bytes
    replicated, every = is_replicated(work), work.micro_batches
    copied = item + reduced  # The gradient is read in the step's dtype and written in the sum's dtype.
    added = item + 2 * reduced  # The gradient is read, and the sum is read and written.
    first = np.where(replicated & (item == reduced), 0, copied)
    accumulated = np.where(program.fuses_accumulation, 0, (first + (every - 1) * added) / every)
    # Some frameworks store both 16-bit gradients and 32-bit sums. For every micro-batch, they cast the gradients to 32
    # bits, and add them to the sums.
    cast_and_added = (item + 4) + 3 * 4
    accumulated = np.where(program.gradient_bytes > 0, cast_and_added, accumulated)
    summed = np.where(replicated | (work.layout.zero == 1), accumulated, copied)
    gathers = np.where(gathered_once_a_step(work) | replicated, 0, 2)
    moved = summed + gathers * 2 * item
    return moved / (work.layout.x * work.layout.y) / (constants.memory * machine.memory_bandwidth)
