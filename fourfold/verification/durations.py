"""Compute how long each matmul and each collective of a step takes on a machine. This module uses the planner's
formulas."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.cost.attention_time import kernel_of
from fourfold.planning.cost.rates import Rates
from fourfold.planning.cost.tensor_sizes import capped_scores, caps_scores
from fourfold.planning.cost.terms import attention_core
from fourfold.planning.cost.terms.bubble import transfer_seconds
from fourfold.planning.cost.terms.collective import gather_seconds, group_of, reduce_seconds
from fourfold.planning.cost.terms.matmul import matmul_seconds
from fourfold.planning.machines.machine import Machine
from fourfold.planning.run_workload import workload_of

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm"}
PICOSECOND = 1e-12
"""One picosecond, in seconds. Durations are integers in picoseconds, so their sums are exact."""


class _Matrix(NamedTuple):
    rows: int
    columns: int
    transposed: bool
    """Whether the matrix is stored column by column."""


class Durations:
    """Computes how many picoseconds the operations of a run take on a machine."""

    def __init__(self, run: RunConfig, machine: Machine) -> None:
        """Prepare the machine's rates for a run.

        Raises:
            UserError: The planner does not support the run (LoRA or [dpo]).
        """
        work, self._machine = workload_of(run), machine
        self._constants = constants_for(machine)
        self._rates, self._kernel = Rates(work, machine, self._constants), kernel_of(work, machine)
        self._item, self._seq = float(work.step.item_bytes), int(work.step.seq_length)
        self._gpus = run.parallel.world_size
        self._capped = float(capped_scores(work).computed) if caps_scores(work) else 0.0
        """Number of scores that attention with soft-capping computes for each query and head. 0 if scores are not
        soft-capped. Soft-capping has no fused kernel, so its time depends on this number."""
        self.exposed = float(self._constants.exposed)
        """How much a hidden collective slows down the computation that runs at the same time, as a fraction of the
        collective's duration."""
        # Cache the results, because the same shapes occur in every layer.
        self._product, self._attention = cache(self._of_matmul), cache(self._of_attention)
        self._collective = cache(self._of_collective)

    def operation(self, name: str, args: Sequence[Any]) -> int:
        """Return how many picoseconds an operation takes: a matmul, or attention. Return 0 for any other operation."""
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        if name in PRODUCTS:
            first, second = [t for t in tensors if t.dim() >= 2][-2:] if "add" in name else tensors[:2]
            many = len(first) if first.dim() == 3 else 1
            return many * self._product(_matrix(first), _matrix(second), name == "_scaled_mm")
        if is_attention(name):
            backward = "backward" in name
            queries, keys = tensors[1:3] if backward else tensors[:2]
            # ``attend_documents`` takes [B, S, N, D], and torch's kernels take [B, N, S, D]. Assume one document per
            # sequence, because the documents' lengths are unknown here.
            if "documents" in name:
                queries, keys = queries.transpose(1, 2), keys.transpose(1, 2)
            sequences, heads, tokens, width = queries.shape
            if self._capped and "documents" in name:
                return self._of_capped(sequences * heads * tokens, width, backward)
            causal = "documents" in name or any(arg is True for arg in args)
            return self._attention(sequences * heads, tokens, keys.shape[2], width, causal, backward)
        return 0

    def collective(self, operation: str, axis: str, size: int, ranks: tuple[int, ...]) -> int:
        """Return how many picoseconds a collective takes if no other collective uses the same links.

        Args:
            operation: Name of the operation, such as "all_gather".
            axis: Name of the axis.
            size: Number of bytes of the full tensor.
            ranks: Ranks of the processes in the collective.
        """
        return self._collective(operation, axis, size, len(ranks), min(abs(b - a) for a, b in pairwise(ranks)))

    def _of_matmul(self, first: _Matrix, second: _Matrix, in_float8: bool) -> int:
        """Return how many picoseconds a matmul of ``first`` and ``second`` takes.

        The rate depends on which operand is transposed. In a linear layer, the forward pass transposes the second
        operand, and the weight gradient transposes the first operand.
        """
        rates = self._rates
        layout = rates.tn if first.transposed else rates.nt if second.transposed else rates.nn
        seconds = matmul_seconds(
            first.rows, second.columns, first.columns, rate=layout * (rates.matmul if in_float8 else rates.head),
            units=rates.units, bandwidth=rates.bandwidth, item=self._item,
        )  # fmt: skip
        return picoseconds(seconds)

    def _of_attention(self, heads: int, queries: int, keys: int, width: int, causal: bool, backward: bool) -> int:
        flops = 4 * heads * queries * keys * width / (2 if causal else 1)
        seconds = attention_core.flash_seconds(flops, self._seq, width, rate=self._rates.attention, kernel=self._kernel)
        return picoseconds(seconds * (attention_core.BACKWARD if backward else 1))

    def _of_capped(self, queries: int, width: int, backward: bool) -> int:
        rates = self._rates
        seconds = attention_core.capped_seconds(
            queries * self._capped, width, rate=rates.matmul, bandwidth=rates.bandwidth
        )
        return picoseconds(seconds[backward])

    def _of_collective(self, operation: str, axis: str, size: int, ranks: int, stride: int) -> int:
        if axis == "pp" and operation == "send":
            return picoseconds(transfer_seconds(size, self._gpus, self._machine, self._constants))
        group = group_of(ranks, stride, self._machine, self._constants)
        if operation == "all_reduce":
            return picoseconds(reduce_seconds(size, 1, group))
        # A gather over n ranks takes n - 1 steps, and a send takes as long as one step.
        if operation == "send":
            return picoseconds(gather_seconds(ranks * size, 1, group) / (ranks - 1))
        return picoseconds(gather_seconds(size, 1, group))


def is_attention(name: str) -> bool:
    """Return whether an operation computes attention, forward or backward."""
    return "attention" in name or "attend" in name


def picoseconds(seconds: Any) -> int:
    return round(float(seconds) / PICOSECOND)


def _matrix(tensor: Tensor) -> _Matrix:
    *_, rows, columns = tensor.shape
    return _Matrix(rows, columns, tensor.stride(-2) == 1 and rows > 1)
