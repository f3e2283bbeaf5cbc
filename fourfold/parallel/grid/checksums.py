"""Compute checksums of tensors on their device, and record the checksums of all data that a process sends in a step.

Two runs of the same step must send the same data. If they do not, the records show which rank computed a wrong result.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.parallel.grid.communicate import PURPOSE
from fourfold.torch_internals import TorchDispatchMode

CHUNK = 1 << 22
"""Number of elements that are summed at once. The sum is weighted, and its weights take eight bytes per element. So
this number limits the memory for the weights."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

FIRST_IS_INPUT = ("allreduce_", "send", "recv_")
SECOND_IS_INPUT = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")


def checksum(tensor: Tensor) -> Tensor:
    """Read a tensor's elements as integers, and return their weighted sum mod 2^64, an int64 on the tensor's device.

    The weights depend on the position. They are odd, so one flipped bit always changes the sum.
    """
    words = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    odd = 2 * torch.arange(min(CHUNK, len(words)), device=tensor.device) + 1
    for number, chunk in enumerate(words.split(CHUNK)):
        total += (chunk * odd[: len(chunk)]).sum() * (2 * number + 1)
    return total


class Given(NamedTuple):
    """An entry in a process's log of a step: data that the process sent or kept, or a message that it received."""

    members: tuple[int, ...]
    """The ranks of the collective, or the sender and the receiver of a message. Empty if the process keeps the data."""
    what: str
    """What the data is for."""
    checksum: int
    """Checksum of the data. 0 if this process only received it."""


class CollectiveInputs(TorchDispatchMode):
    """Records the checksum of every tensor that this process passes to a collective while this context is open.

    Collectives of FSDP2 are recorded too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's __init__ has no annotations
        self._notes: list[tuple[tuple[int, ...], str]] = []
        self._checksums: list[Tensor] = []

    def note(self, tensor: Tensor, what: str, members: tuple[int, ...] = ()) -> None:
        """Record a tensor's checksum and what the tensor is for."""
        self._notes.append((members, what))
        self._checksums.append(checksum(tensor))

    def given(self) -> list[Given]:
        """Return all records in order. This waits for the device."""
        if any(each.is_cuda for each in self._checksums):
            # Wait for all streams, because FSDP2 communicates on its own streams.
            torch.cuda.synchronize()
        sums = torch.stack(self._checksums).tolist() if self._checksums else []
        return [Given(members, what, value) for (members, what), value in zip(self._notes, sums, strict=True)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__
            if name in FIRST_IS_INPUT:
                self._note_collective(name, args[0][0], dist.ProcessGroup.unbox(args[1]), args)
            elif name in SECOND_IS_INPUT:
                self._note_collective(name, args[1], dist.ProcessGroup.unbox(args[2]), args)
        return func(*args, **(kwargs or {}))

    def _note_collective(self, name: str, tensor: Tensor, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        if group.size() == 1:
            return
        members, me = tuple(dist.get_process_group_ranks(group)), dist.get_rank()
        if name == "send":
            members = (me, members[args[2]])
        elif name == "recv_":
            members = (members[args[2]], me)
        purpose = PURPOSE.get()
        # fourfold does not name the purpose of FSDP2's collectives, so derive the purpose from the operation.
        of_fsdp = "weights" if name == "_allgather_base_" else "gradients"
        why = of_fsdp if purpose is None else purpose.why
        if name == "recv_":
            # The content is about to be overwritten, so do not record it.
            tensor = tensor.new_zeros(0)
        self.note(tensor, f"its part of the collective '{why}'", members)


def first_to_differ(first: Sequence[Sequence[Given]], second: Sequence[Sequence[Given]]) -> dict[int, str]:
    """Compare the logs of two runs of the same step, and find the ranks that computed different results.

    Args:
        first: the log of each rank in the first run.
        second: the log of each rank in the second run.

    Returns:
        A dict. Its keys are the ranks whose own computation differed. The value says what the rank's first differing
        data was for. A rank is left out if its data differ only after a collective with another differing rank, because
        it may have received wrong data.
    """
    differing = [_differing(one, two) for one, two in zip(first, second, strict=True)]
    tainted: dict[tuple[tuple[int, ...], int], set[int]] = {}
    for rank, places in enumerate(differing):
        instances = _instances(first[rank])
        for place in places:
            tainted.setdefault(instances[place], set()).add(rank)
    found = {}
    for rank, places in enumerate(differing):
        if places:
            before = [key for key in _instances(first[rank])[: places[0]] if key[0]]
            if not any(tainted.get(key, set()) - {rank} for key in before):
                found[rank] = first[rank][min(places[0], len(first[rank]) - 1)].what
    return found


def _differing(one: Sequence[Given], two: Sequence[Given]) -> list[int]:
    places = [place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b]
    return places if len(one) == len(two) else [*places, min(len(one), len(two)) - 1]


def _instances(log: Sequence[Given]) -> list[tuple[tuple[int, ...], int]]:
    """Return an identifier for each collective in a log. All members of a collective compute the same identifier.

    It consists of the members, and of the number of earlier collectives among the same members.
    """
    counts: dict[tuple[int, ...], int] = {}
    instances = []
    for given in log:
        counts[given.members] = counts.get(given.members, -1) + 1
        instances.append((given.members, counts[given.members]))
    return instances
