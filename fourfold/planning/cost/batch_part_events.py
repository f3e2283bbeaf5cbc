"""List the computations and collectives of blocks whose batch parts (``overlap.batch_parts``) take turns, in the order
of execution. Batch parts are parts of a micro-batch. x and y are the tensor axes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from fourfold.overlap_order import Steps, Until, run_batch_parts


@dataclass(frozen=True)
class Kind:
    """The properties of a block that determine the order of its events."""

    batch_parts: int
    """Number of batch parts of a micro-batch."""
    x: bool
    """Whether the axis x has more than one rank."""
    y: bool
    """Whether the axis y has more than one rank."""
    tokens: bool
    """Whether each part holds some tokens of all sequences. Attention then waits for all parts."""
    recompute: int
    """Index into ``workload.RECOMPUTE`` (none, selective, full)."""
    parts_cross_blocks: bool
    """Whether a part can enter a block while another part is still in the previous block."""
    split_backward: bool
    """Whether weight gradients are computed later, in a separate pass. They are then not among the events."""
    overlap: bool
    """Whether the sums of input gradients overlap with the computation of weight gradients."""
    gate: bool
    """Whether the MLP has a gate."""
    gate_first: bool
    """Whether the all-reduce of gate over y overlaps with the matmul of up."""
    parallel_residual: bool
    """Whether attention and MLP read the same residual stream."""
    norms_before: bool
    """Whether norms apply to the inputs of attention and MLP."""
    norms_after: bool
    """Whether norms apply to the outputs of attention and MLP."""
    whole_keys: bool
    """Whether the y ranks divide the queries of a sequence among themselves. Each of them then gathers all keys and
    values."""
    attention_again: bool
    """Whether selective recompute repeats the attention core."""
    activation_again: bool
    """Whether selective recompute repeats the MLP's activation."""
    norms_again: bool
    """Whether selective recompute repeats the norms before attention and MLP."""
    gathers_again: bool
    """Whether selective recompute repeats the all-gathers over x and y."""


class Event(NamedTuple):
    """A computation, the start of a collective ("issue"), or the wait for a collective.

    ``what`` names the computation or the collective. ``batch_part_time`` returns its duration under this name.
    ``axis``, ``block``, and ``flight`` are set only for collectives. The start of a collective and the wait for it have
    the same ``flight``.
    """

    kind: Literal["compute", "issue", "wait"]
    what: str
    axis: str = ""
    block: int = -1
    flight: tuple[object, ...] = ()


class Linear(NamedTuple):
    """The collectives of a linear layer.

    - reads: the axis over which the backward pass sums the input gradient. If ``gathers`` is set, the forward pass also
      all-gathers the input over this axis. Otherwise, each rank of the axis already has the full input.
    - writes: the axis over which the outputs are summed. If ``shares`` is set, this is a reduce-scatter, so each rank
      gets only its shard, and the backward pass all-gathers the output gradient. Otherwise, it is an all-reduce.
    """

    name: str
    reads: str
    gathers: bool
    writes: str
    shares: bool


QKV, O_PROJ = Linear("qkv", "x", True, "y", True), Linear("o_proj", "y", True, "x", True)
UP, DOWN = Linear("up", "x", True, "y", False), Linear("down", "y", False, "x", True)


class Recording:
    """The events of consecutive blocks. ``forward`` lists the events of the forward pass in order. ``backward`` has one
    list for each autograd node, with the events of the node's backward pass."""

    def __init__(self, kind: Kind, blocks: int, again: bool = False) -> None:
        """Record the events of ``blocks`` blocks.

        With ``again``, record a recomputation of these blocks. The recomputation ends as soon as it has computed all
        tensors that the backward pass reads.
        """
        self._kind, self._again = kind, again
        self.forward: list[Event] = []
        self.backward: list[list[Event]] = []
        self.first_read = 0
        """Index in ``backward`` of the node that is the first to read saved tensors in the backward pass."""
        run_batch_parts((self._through(part, blocks) for part in range(kind.batch_parts)), runs_ahead=not kind.y)

    def _through(self, part: int, blocks: int) -> Steps[None]:
        for block in range(blocks):
            yield from self._block((block, part), is_last=block == blocks - 1)

    def _block(self, place: tuple[int, int], is_last: bool) -> Steps[None]:
        """Record the events of one part in one block. ``place`` has the indices of the block and the part. Yield at the
        same points as ``parallel.overlap.batch_parts.BlockInParts.steps``, so that the parts take turns as in
        training."""
        kind = self._kind
        waits_for_up = kind.x and not kind.parallel_residual
        self._norm(place, kind.norms_before, "attention", again=kind.norms_again)
        yield from self._linear(place, QKV)
        if kind.tokens:
            yield Until.ALL_PARTS
        self._attention(place)
        yield from self._linear(place, O_PROJ, hides=UP if waits_for_up else None, before_gather=True)
        self._norm(place, kind.norms_after, "attention's output")
        self._norm(place, kind.norms_before, "mlp", again=kind.norms_again)
        yield from self._linear(place, UP, later=waits_for_up)
        ends_early = self._again and not kind.norms_after
        down = self._linear(place, DOWN, ends_early=ends_early, before_gather=not is_last)
        if kind.recompute == 1 and kind.activation_again:
            # Recompute repeats the activation and down as one unit, so no other batch part can run between the two.
            for _ in down:
                pass
        else:
            yield from down
        if not ends_early:
            self._norm(place, kind.norms_after, "mlp's output")

    def _linear(
        self,
        place: tuple[int, int],
        layer: Linear,
        *,
        ends_early: bool = False,
        later: bool = False,
        hides: Linear | None = None,
        before_gather: bool = False,
    ) -> Steps[None]:
        """Record the events of one part in a linear layer. Yield at the same points as
        ``parallel.tensor.linear_steps.linear_steps``, so that the parts take turns as in training.

        Args:
            place: Indices of the block and the part.
            layer: The linear layer.
            ends_early: Whether a recomputation ends before the matmul of this layer.
            later: Whether the backward pass computes this layer's weight gradient later, in another layer.
            hides: The layer whose weight gradient is computed while this layer all-gathers its output gradient.
            before_gather: Whether an all-gather directly follows the sum of this layer's outputs.
        """
        kind, name = self._kind, layer.name
        reads, writes = (getattr(kind, axis) for axis in (layer.reads, layer.writes))
        from_input, summed = (_issue(name, layer.reads, place, what) for what in ("tokens", "input gradient"))
        of_output, gathered_back = (_issue(name, layer.writes, place, what) for what in ("outputs", "output gradient"))
        gathers, shares = reads and layer.gathers, writes and layer.shares
        if reads:
            self._node([from_input] if gathers else [], [_wait(summed)])
            if gathers:
                yield Until.GATHERED
        backward = list(self._gathers_again(place, layer))
        backward += [_wait(gathered_back)] if shares else []
        backward += [Event("compute", f"{name}_input_gradient")]
        if reads:
            backward += [summed] if kind.overlap else [summed, _wait(summed)]
        backward += [] if later else self._weight_gradients(place, layer)
        self._node([_wait(from_input)] if gathers else [], backward, reads_saved=True)
        if ends_early:
            if writes:
                yield Until.SUMMED
            yield Until.ALL_PARTS
            return
        matmuls = [Event("compute", name)]
        sums = [of_output] if writes else []
        if layer is UP and kind.gate and kind.y:
            gate = _issue(name, layer.writes, place, "gate")
            matmuls = [Event("compute", "half_up"), gate, *([] if kind.gate_first else [_wait(gate)])]
            matmuls += [Event("compute", "half_up")]
            sums += [gate]
        self._node([*matmuls, *sums[:1]], [])
        if not writes:
            return
        yield Until.SUMMED_TO_GATHER if before_gather else Until.SUMMED
        after = [gathered_back] if shares else []
        self._node([_wait(each) for each in sums], after + (self._weight_gradients(place, hides) if hides else []))

    def _gathers_again(self, place: tuple[int, int], layer: Linear) -> Iterator[Event]:
        kind = self._kind
        if kind.recompute == 1 and kind.gathers_again and layer.gathers and getattr(kind, layer.reads):
            yield _issue(layer.name, layer.reads, place, "again")

    def _weight_gradients(self, place: tuple[int, int], layer: Linear) -> list[Event]:
        if self._kind.split_backward:
            return []
        waits = [_wait(event) for event in self._gathers_again(place, layer)]
        return [*waits, Event("compute", f"{layer.name}_weight_gradient")]

    def _attention(self, place: tuple[int, int]) -> None:
        kind = self._kind
        if kind.tokens and place[1] > 0:  # The first batch part runs attention for all parts.
            return
        together = kind.batch_parts if kind.tokens else 1
        computed = [Event("compute", "attention")] * together
        again = computed if kind.recompute == 1 and kind.attention_again else []
        backward = [*again, *[Event("compute", "attention_backward")] * together]
        if kind.whole_keys:
            keys, gradients = (_issue("keys", "y", place, way) for way in ("there", "back"))
            computed, backward = [keys, _wait(keys), *computed], [*backward, gradients, _wait(gradients)]
        self._node(computed, backward, reads_saved=True)

    def _norm(self, place: tuple[int, int], is_there: bool, name: str, again: bool = False) -> None:
        """Record a norm's sums over y in the forward and the backward pass. The block waits for each sum
        immediately."""
        if not is_there:
            return
        forward, backward = list[Event](), list[Event]()
        if self._kind.y:
            there, back = (_issue("norm", "y", place, f"{name}, {way}") for way in ("there", "back"))
            repeated = [there, _wait(there)] if again and self._kind.recompute == 1 else []
            forward, backward = [there, _wait(there)], [*repeated, back, _wait(back)]
        self._node(forward, backward, reads_saved=True)

    def _node(self, forward: Sequence[Event], backward: list[Event], reads_saved: bool = False) -> None:
        self.forward += forward
        self.backward.append(backward)
        if reads_saved:
            self.first_read = len(self.backward) - 1


def _issue(of: str, axis: str, place: tuple[int, int], what: str) -> Event:
    """Return the event that starts a collective.

    Args:
        of: Name of the layer, "norm", or "keys".
        axis: The axis of the collective.
        place: Indices of the block and the part.
        what: What the collective carries, to tell apart the collectives of one layer.
    """
    return Event("issue", f"{of}_{axis}", axis, place[0], (*place, of, what))


def _wait(event: Event) -> Event:
    return event._replace(kind="wait")


@lru_cache(maxsize=1024)
def events_of(kind: Kind) -> list[Event]:
    """Return the events of forward and backward in three consecutive blocks: the first block, one block that represents
    all middle blocks, and the last block.

    If a part cannot enter a block before all parts have left the previous block, return the events of a single block.
    """
    blocks = 3 if kind.parts_cross_blocks else 1
    recording = Recording(kind, blocks)
    events = list(recording.forward)
    for number in reversed(range(len(recording.backward))):
        if kind.recompute == 2 and number == recording.first_read:
            again = Recording(kind, blocks, again=True).forward
            events += [event._replace(flight=("again", *event.flight)) for event in again]
        events += recording.backward[number]
    return events
