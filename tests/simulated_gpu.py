"""Simulate a GPU on the CPU. Its tensors have real values, and it raises the errors of a real device and counts the
host's waits.

Tensors on ``cuda`` hold their values in a CPU tensor. As on a GPU, an operation that mixes them with CPU tensors raises
an error. So does a collective that gloo has and NCCL lacks. All waits of the host are counted. ``FakeTensorMode`` would
not do, because its tensors have no values, and the tested code reads values.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.cuda.nccl
import torch.distributed as dist
import torch.nn.functional as F
from fourfold_lines import line_of_fourfold
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from fourfold.parallel.grid.communicate import NCCL_TYPES

GPU = torch.device("cuda", 0)
aten = torch.ops.aten


class OnGpu(Tensor):
    """A tensor of the simulated GPU. For torch's C++ code it is on ``meta``, which needs no driver."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnGpu:
        """Wrap a tensor of the CPU."""
        made: OnGpu = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device="meta",
        )
        made.values = values
        return made

    device = property(lambda self: GPU)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)
    is_cpu = property(lambda self: False)

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnGpu({self.values})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operation on the CPU if it does not pass through the mode. Autograd's threads run without the
        mode."""
        return _compute(func, args, kwargs or {}, None)


class SimulatedGpu(TorchDispatchMode):
    """Simulate everything on ``cuda`` inside the block.

    Attributes:
        waits: How often the host waited for the device, by the line of fourfold that made it wait.
        collectives: How often each c10d operation ran, except operations that send Python objects.
    """

    def __init__(self, meta: AsksForMeta) -> None:
        super().__init__()
        self.meta = meta
        self.waits: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _compute(func, args, kwargs or {}, self)


class AsksForMeta(TorchFunctionMode):
    """Knows whether Python code asks for tensors on ``meta``. torch's C++ code also asks for such tensors, whenever it
    makes a tensor like an ``OnGpu``."""

    def __init__(self) -> None:
        super().__init__()
        self.asks = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        device = (kwargs or {}).get("device")
        if func in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == "cuda":
            # Return what torch would return, but without a driver.
            return func(*args, **{**kwargs, "device": "cpu"}).to(GPU)
        before = self.asks
        self.asks = before or any(map(_is_meta, tree_leaves((args, kwargs))))
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.asks = before


class Event:
    """Stands for a CUDA event. The simulated GPU computes at once, so an event is always complete."""

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@contextmanager
def simulated_gpu() -> Iterator[SimulatedGpu]:
    """Put a simulated GPU into this process."""
    with (
        patch.object(Tensor, "pin_memory", lambda self, device=None: self),
        patch.object(torch.cuda.nccl, "version", lambda: (2, 28, 9)),  # error messages of torch include this version
        patch.object(dist, "get_backend", lambda group=None: "nccl"),
        patch.object(torch.cuda, "synchronize", lambda device=None: None),
        patch.object(torch.cuda, "Event", Event),
        patch.object(torch.cuda, "_lazy_init", lambda: None),
        patch.object(torch.cuda, "max_memory_allocated", lambda device=None: 0),
        AsksForMeta() as asks,
        SimulatedGpu(asks) as mode,
    ):
        yield mode


def _is_meta(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not isinstance(value, OnGpu) and value.device.type == "meta"
    return isinstance(value, str | torch.device) and str(value) == "meta"


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], mode: SimulatedGpu | None) -> Any:
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_gpu = [tensor for tensor in tensors if isinstance(tensor, OnGpu)]
    wanted = kwargs.get("device")
    device = torch.device(wanted) if wanted is not None else None
    is_factory = not tensors and (mode is None or not mode.meta.asks)
    to_gpu = device is not None and (device.type == "cuda" or (device.type == "meta" and is_factory))
    if func.namespace == "c10d" and mode is not None and not _sends_objects():
        _check_collective(func, tensors)
        mode.collectives[func._overloadpacket.__name__] += 1
    if not on_gpu and not to_gpu:
        return func(*args, **kwargs)
    is_copy = func in (aten._to_copy.default, aten.copy_.default)
    if on_gpu and not is_copy:
        _check_devices(func, tensors)
    if mode is not None and _waits(func, args, kwargs, bool(on_gpu)):
        mode.waits[line_of_fourfold()] += 1
    to_cpu = device is not None and device.type == "cpu"
    if to_gpu or (device is not None and device.type == "meta" and on_gpu):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if func is aten._to_copy.default and device is not None and device.type != "cpu" and "device" in kwargs:
        kwargs["device"] = torch.device("cpu")
    out = ON_CPU.get(func, func)(*tree_map(_values, args), **tree_map(_values, kwargs))
    if func is aten._local_scalar_dense.default:
        return out
    # In-place operations return a tensor that they were given, which is on the GPU already.
    known = {id(tensor.values): tensor for tensor in on_gpu}
    if func is aten.copy_.default:
        return args[0]
    if to_cpu:
        return out
    return tree_map(lambda t: (known[id(t)] if id(t) in known else OnGpu(t)) if isinstance(t, Tensor) else t, out)


def _values(value: Any) -> Any:
    return value.values if isinstance(value, OnGpu) else value


def _check_devices(func: Any, tensors: list[Tensor]) -> None:
    """Raise an error if an operation mixes devices. As in torch, tensors without dims may be on the CPU."""
    if "c10d" in str(func):
        return
    for tensor in tensors:
        if not isinstance(tensor, OnGpu) and tensor.ndim > 0:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
                f"{tensor.device}, in {func}"
            )


def _sends_objects() -> bool:
    """Return whether torch is sending Python objects, whose bytes torch itself moves to the device of the group."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    return any("_object" in code.co_name and "distributed_c10d" in code.co_filename for code in codes)


def _check_collective(func: Any, tensors: list[Tensor]) -> None:
    """Raise an error for calls that NCCL refuses. Gloo would accept these calls."""
    name = func._overloadpacket.__name__
    if name == "barrier":
        return
    if name not in OF_NCCL:
        raise RuntimeError(f"ProcessGroupNCCL does not support {name}")
    for tensor in tensors:
        if not isinstance(tensor, OnGpu):
            raise RuntimeError(f"No backend type associated with device type CPU, in {name}")
        if not tensor.is_contiguous():
            raise RuntimeError(f"Tensors must be contiguous, in {name}")
        if tensor.dtype not in NCCL_TYPES:
            raise RuntimeError(f"Unconvertible NCCL type {tensor.dtype}, in {name}")


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reads: bool) -> bool:
    """Return whether the host waits for the device, either to read values or to finish a copy to or from the device."""
    if func in READ_VALUES:
        return reads
    if func is aten._to_copy.default:
        source, wanted = args[0].device.type, torch.device(kwargs.get("device") or args[0].device).type
        return {source, wanted} == {"cpu", "cuda"} and not kwargs.get("non_blocking")
    if func is aten.copy_.default:
        is_waiting = not (kwargs.get("non_blocking") or args[2:] == (True,))
        return isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu) and is_waiting
    return False


def _efficient_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, _: bool, dropout: float, causal: bool, *, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    flash = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = flash(q, k, v, dropout, causal, attn_mask=bias, scale=scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out, F.pad(lse, (0, -lse.shape[2] % 32)), seed, seed.clone()


def _efficient_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *rest: Any,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, None]:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    causal = rest[-1]
    lse = lse[..., : q.shape[2]].contiguous()
    return *backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=bias, scale=scale), None


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, *, scale: float) -> tuple[Any, ...]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    seed = torch.zeros((), dtype=torch.int64)
    return out, lse, None, None, q.shape[2], k.shape[2], seed, seed.clone(), None


def _flash_attention_backward(*given: Any, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    grads: tuple[Tensor, Tensor, Tensor] = backward(*given[:6], 0.0, given[11], scale=scale)
    return grads


def _product_in_float32(total: Tensor, left: Tensor, right: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return out.copy_(total + left.to(out_dtype) @ right.to(out_dtype))


OF_NCCL = {
    "allreduce_", "_allgather_base_", "allgather_", "_reduce_scatter_base_", "reduce_scatter_", "alltoall_base_",
    "alltoall_", "broadcast_", "send", "recv_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_",
}  # fmt: skip
READ_VALUES = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
ON_CPU: dict[Any, Callable[..., Any]] = {
    aten._scaled_dot_product_efficient_attention.default: _efficient_attention,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_attention_backward,
    aten._scaled_dot_product_flash_attention.default: _flash_attention,
    aten._scaled_dot_product_flash_attention_backward.default: _flash_attention_backward,
    aten.addmm.dtype_out: _product_in_float32,
}
"""CPU replacements for operations that torch has only for CUDA."""
