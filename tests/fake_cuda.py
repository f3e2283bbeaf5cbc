"""Pretend to have a GPU: tensors claim to be on CUDA, and every place at which the host would wait for the GPU is
recorded.

``FakeTensorMode`` gives tensors shapes and devices without memory. torch runs a backward on such tensors only if it
believes that a GPU exists. ``pretend`` makes torch believe this until the process ends. So call ``pretend`` only in a
separate process, as ``python tests/fake_cuda_steps.py`` does.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from fourfold_lines import line_of_fourfold
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

_KEPT: list[Any] = []
IS_BUILT, HAS_PRIMARY_CONTEXT = 2, 4
"""Positions of two virtual functions in torch's AcceleratorHooksInterface. Two destructors come before them."""
TABLE = ctypes.c_void_p * 96


def pretend() -> None:
    """Make autograd's engine accept CUDA tensors in this process. Call this before the first backward of the
    process."""
    libraries = Path(torch.__file__).parent / "lib"
    if torch.version.cuda is None:
        # In a torch build for CPUs, no device guard for CUDA is registered. Register a guard that reports 0
        # devices, because torch replaces such a guard with its own, which does nothing.
        guards = TABLE.in_dll(ctypes.CDLL(str(libraries / "libc10.so")), "_ZN3c104impl26device_guard_impl_registryE")
        nothing = TABLE(*[_function(0)] * len(TABLE()))
        guards[1] = ctypes.addressof(_kept(ctypes.c_void_p(ctypes.addressof(_kept(nothing)))))
    torch._C._ensureCUDADeviceGuardSet()
    find_hooks: Any = ctypes.CDLL(str(libraries / "libtorch_cpu.so"))._ZN2at6detail12getCUDAHooksEv
    find_hooks.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(find_hooks())
    assert hooks.value is not None
    table = _kept(TABLE.from_buffer_copy(TABLE.from_address(hooks.value)))
    table[IS_BUILT], table[HAS_PRIMARY_CONTEXT] = _function(1), _function(0)
    hooks.value = ctypes.addressof(table)


def _function(result: int) -> int | None:
    return ctypes.cast(_kept(ctypes.CFUNCTYPE(ctypes.c_int)(lambda: result)), ctypes.c_void_p).value


def _kept(value: Any) -> Any:
    _KEPT.append(value)
    return value


class HostWaits(TorchDispatchMode):
    """Records the lines of fourfold at which the host waits for a GPU, to read numbers or to finish a copy. Enter it
    inside a ``FakeTensorMode``. Operations whose output shapes depend on data need no record, because they raise an
    error in this mode.
    """

    def __init__(self, rows: int = 1) -> None:
        """rows: The value to return for every integer that the host reads."""
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.rows = rows
        self._pinned: set[int] = set()

    def note(self, what: str) -> None:
        """Record that the host waits here."""
        self.waits[f"{line_of_fourfold()}: {what}"] += 1

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Replace the functions of torch.cuda that need a GPU."""
        with ExitStack() as stack:
            for name, value in {
                "Stream": lambda *_, **__: _Stream(self),
                "Event": lambda *_, **__: _Event(self),
                "current_stream": lambda *_: _Stream(self),
                "stream": lambda _: nullcontext(),
                "current_device": lambda: 0,
                "synchronize": lambda *_: self.note("torch.cuda.synchronize"),
                "max_memory_allocated": lambda *_: 0,
                "get_device_capability": lambda *_: (9, 0),
                "get_device_name": lambda *_: "NVIDIA H100 80GB HBM3",
            }.items():
                stack.enter_context(patch.object(torch.cuda, name, value))
            stack.enter_context(patch.object(torch.accelerator, "current_stream", lambda *_: _Stream(self)))
            stack.enter_context(patch.object(FakeTensor, "tolist", lambda tensor: self._list(tensor)))
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func._overloadpacket.__name__
        if name == "_local_scalar_dense":
            return self._read(args[0])
        if name == "is_pinned":
            return self._is_pinned(args[0])
        if name == "record_stream":
            return None
        if name == "_pin_memory":
            return self._pin(torch.empty(args[0].shape, dtype=args[0].dtype))
        if func is torch.ops.aten.addmm.dtype_out:
            return kwargs["out"]  # torch 2.11 cannot run this operation on fake tensors
        out = func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            self._pin(out)
        if name in ("_to_copy", "copy_"):
            source, target = (args[0], out) if name == "_to_copy" else (args[1], args[0])
            free = bool(kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,)))
            self._copy(source, target, free)
        return out

    def _list(self, tensor: Tensor) -> Any:
        """Return the result of ``tolist``, and record that the host waits once."""
        waited, self.waits = self.waits, Counter()
        values: Any = [self._list(each) for each in tensor] if tensor.dim() else tensor.item()
        self.waits = waited
        if tensor.is_cuda:
            self.note("reads numbers")
        return values

    def _read(self, tensor: Tensor) -> bool | int | float:
        if tensor.is_cuda:
            self.note("reads a number")
        if tensor.dtype == torch.bool:
            return False
        return 1.0 if tensor.is_floating_point() else self.rows

    def _copy(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        if source.is_cuda == target.is_cuda:
            return
        if not non_blocking or not self._is_pinned(source if target.is_cuda else target):
            self.note("copies to the device" if target.is_cuda else "copies to the host")

    def _pin(self, tensor: Tensor) -> Tensor:
        self._pinned.add(tensor.untyped_storage()._cdata)
        _KEPT.append(tensor.untyped_storage())  # keep it alive, so that no other storage gets its address
        return tensor

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned


class _Stream:
    """A stream that does nothing."""

    stream_id, device_index, device_type = 0, 0, 1

    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Event:
        return event or _Event(self._waits)

    def synchronize(self) -> None:
        self._waits.note("waits for a stream")


class _Event:
    """An event that does nothing."""

    def __init__(self, waits: HostWaits) -> None:
        self._waits = waits

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self._waits.note("waits for an event")
