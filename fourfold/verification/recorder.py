"""Record every operation of a step: collectives by axis and purpose, and live memory by category."""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fourfold.data.loader import MicroBatch
from fourfold.parallel.attention.block_attention import WIDEST_FLASH, AttentionScores
from fourfold.parallel.attention.document_attention import KeyLimits, attend_in_turn, differentiate_in_turn
from fourfold.parallel.grid.communicate import ON_WAIT, PURPOSE, Purpose
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.memory.offload import OFFLOAD
from fourfold.torch_internals import TorchDispatchMode, tensors_in
from fourfold.training.job import Job
from fourfold.verification.collective_names import CollectiveNames
from fourfold.verification.durations import PRODUCTS, Durations, is_attention
from fourfold.verification.exposure import Flights, Line

Tag = Literal["parameters", "optimizer", "gradients", "weights", "activations", "offloaded", "batch"]

OPERATIONS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    # On gloo, fourfold runs a reduce-scatter as an all-to-all and a local sum (communicate.by_all_to_all).
    "alltoall_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "send": "send",
}


class Recorder(TorchDispatchMode):
    """Records a job's operations from ``start`` until the context closes.

    A storage's bytes are counted from its first appearance until Python frees it or FSDP2 resizes it to 0.
    """

    def __init__(self, grid: Grid, durations: Durations | None = None, is_for_gpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's has no annotations
        self.names = CollectiveNames(grid)
        self.collectives: dict[Line, list[int]] = {}
        self.flights = Flights(durations.exposed if durations is not None else 0.0)
        self._durations, self._is_for_gpu = durations, is_for_gpu
        self._sent: tuple[Purpose, int] | None = None
        self.live: Counter[str] = Counter()
        self.peaks: Counter[tuple[str, str]] = Counter()
        self.parameters = self.gradients = self.optimizer = 0
        self.window: Literal["early", "late"] = "early"
        self._storages: dict[int, tuple[Tag, int]] = {}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._job: Job | None = None
        self._inside = False
        self._resize = torch.UntypedStorage.resize_

    def own(self, job: Job) -> None:
        """Give the parameters, the optimizer states, and the weight averages of a job their memory category (tag).
        Count the bytes of each category."""
        self._job = job
        for shard in job.shards:
            self._tag(shard.local, "parameters")
        for index in range(len(job.trained)):
            job.optimizer.moments(index)
        averages = [] if job.average is None else job.average.averages
        for tensor in (*job.optimizer.states(), *averages):
            self._tag(tensor, "optimizer")
        self.parameters = sum(shard.local.nbytes for shard in job.shards)
        self.optimizer = sum(m.nbytes for i in range(len(job.trained)) for m in job.optimizer.moments(i).values())
        self.optimizer += sum(average.nbytes for average in averages)
        self._find_gradients_and_weights()

    def exclude(self, micro_batches: Sequence[MicroBatch[Tensor]]) -> None:
        """Do not count the memory of a step's inputs."""
        for micro_batch in micro_batches:
            for field in fields(micro_batch):
                if (tensor := getattr(micro_batch, field.name)) is not None:
                    storage = tensor.untyped_storage()
                    self._references[id(storage)] = weakref.ref(storage)
                    self._storages[id(storage)] = ("batch", storage.nbytes())

    def start(self) -> None:
        """Clear the collectives and memory peaks that were recorded while the job was built."""
        self.collectives.clear()
        self.flights.start()
        self.peaks.clear()

    def watch(self, layers: Sequence[torch.nn.Module]) -> None:
        """Record two memory peaks: the peak until the backward pass of the last of ``layers`` ends ("early"), and the
        peak after that moment ("late").

        In the early part, the activations of all layers are in memory. In the late part, gradients accumulate. Each
        peak alone is linear in the number of layers, so it can be extrapolated. The maximum of both is not linear.
        """

        def enter(window: Literal["early", "late"]) -> None:
            self._settle()
            self.window = window

        def enter_late_in_the_backward(
            module: torch.nn.Module, inputs: tuple[Any, ...], out: Tensor | list[Tensor]
        ) -> None:
            # If ``out`` is a list of batch parts, the backward pass of the first part runs last.
            first = out if isinstance(out, Tensor) else out[0]
            first.register_hook(lambda _: enter("late"))

        if len(layers) > 1:
            layers[0].register_forward_pre_hook(lambda *_: enter("early"))
            layers[-2].register_forward_hook(enter_late_in_the_backward)

    def __enter__(self) -> Self:
        # FSDP2 resizes the storage of gathered weights, which a dispatch mode does not see. So replace the method.
        setattr(torch.UntypedStorage, "resize_", self._counting_resize())  # noqa: B010 (mypy rejects the assignment)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._notified = ON_WAIT.set(lambda out: self.flights.land(id(out.untyped_storage())))
        return self

    def __exit__(self, *exception: Any) -> None:
        ON_WAIT.reset(self._notified)
        self.flights.land_all()
        self._settle()
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "fsdp":
            # FSDP2 waits for gathered weights when it copies them out.
            for tensor in tensors_in(args):
                self.flights.land(id(tensor.untyped_storage()))
        in_turn = None if self._inside else capped_in_turn(name, args)
        out = func(*args, **(kwargs or {})) if in_turn is None else self._watched(in_turn)
        if not self._inside and (name in PRODUCTS or is_attention(name)):
            self.flights.compute(0 if self._durations is None else self._durations.operation(name, args))
        if func.namespace == "fsdp":
            tag: Tag = "gradients" if name == "chunk_cat" else "weights"
            for tensor in tensors_in((out, (kwargs or {}).get("out"))):
                self._tag(tensor, tag)
        elif func.namespace == "c10d" and name in OPERATIONS:
            self._collective(OPERATIONS[name], args)
        elif func.namespace == "c10d" and name == "recv_":
            self._receive(args[0][0])
        if not func.is_view and func.namespace != "prim":
            self._settle()
        for tensor in tensors_in(out):
            self._see(tensor)
        if self._is_for_gpu and not self._inside and in_turn is None:
            self._use_briefly(workspace_of(name, args, kwargs or {}))
        if func.namespace == "c10d" or name in ("mm", "copy_", "_to_copy"):
            self._find_gradients_and_weights()
        return out

    def _watched(self, operations: Callable[[], Any]) -> Any:
        """Run several operations that count as one operation in the step's time. Record the memory of each of them."""
        self._inside = True
        super().__enter__()  # type: ignore[no-untyped-call]
        try:
            return operations()
        finally:
            super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._inside = False

    def _collective(self, operation: str, args: tuple[Any, ...]) -> None:
        first, group_index = (args[0][0], 1) if operation in ("all_reduce", "send") else (args[0], 2)
        group = dist.ProcessGroup.unbox(args[group_index])
        if group.size() == 1:
            return
        whole = args[1] if operation == "reduce_scatter" else first
        line, purpose, storage = self.names.line(operation, group), PURPOSE.get(), id(first.untyped_storage())
        if line[2] == "gradients":
            for buffer in (first, whole):
                self._tag(buffer, "gradients")
        entry = self.collectives.setdefault(line, [0, 0])
        entry[0] += 1
        entry[1] += whole.nbytes
        # The storage of a collective's result identifies the collective, except in FSDP2's gradient sums. FSDP2 waits
        # for a sum only when it issues the next sum, and the storage of the earlier sum may be freed by then. So
        # ``line`` identifies these sums, and ``issue`` waits for the earlier sum before it records the next sum.
        is_sum_of_fsdp = purpose is None and operation != "all_gather"
        duration = 0
        if self._durations is not None:
            ranks = tuple(dist.get_process_group_ranks(group))
            duration = self._durations.collective(line[1], line[0], whole.nbytes, ranks)
        self.flights.issue(line if is_sum_of_fsdp else storage, line, whole.nbytes, duration)
        self._sent = (purpose, storage) if operation == "send" and purpose is not None else None

    def _receive(self, tensor: Tensor) -> None:
        """From now on, identify the most recent send by the tensor that is received together with it. The rank waits
        only for the received tensor."""
        if self._sent is not None and self._sent[0] is PURPOSE.get():
            self.flights.move(self._sent[1], id(tensor.untyped_storage()))
        self._sent = None

    def _find_gradients_and_weights(self) -> None:
        """Find all gradients and gathered weights in the job, and tag them. This is a search, because no recorded
        operation shows when a parameter gets a gradient, or when FSDP2 gets weights."""
        if self._job is None:
            return
        total = 0
        for shard in self._job.shards:
            if (grad := shard.grad) is not None:
                self._tag(grad, "gradients")
                total += grad.nbytes
        for stage in self._job.stages.values():
            for weights in stage.gathered():
                self._tag(weights, "weights")
            for grad in stage.partial_gradients():
                self._tag(grad, "gradients")
        self.gradients = max(self.gradients, total)

    def _see(self, tensor: Tensor) -> None:
        # Skip DTensors, because they only describe a tensor. The local tensor is recorded separately.
        if isinstance(tensor, DTensor):
            return
        # As long as a tensor uses a storage, torch keeps the same Python object for this storage. So the object's id
        # identifies the storage.
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self._storages:
            return
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        purpose = PURPOSE.get()
        offloaded = purpose is not None and purpose.why == OFFLOAD
        self._storages[key] = ("offloaded" if offloaded else "activations", 0)
        self._resize_to(key, storage.nbytes())

    def _tag(self, tensor: Tensor, tag: Tag) -> None:
        self._see(tensor)
        key = id(tensor.untyped_storage())
        old, size = self._storages[key]
        if old == tag or old in ("parameters", "optimizer", "batch"):
            return
        self._storages[key] = (tag, size)
        self.live[old] -= size
        self.live[tag] += size

    def _resize_to(self, key: int, size: int) -> None:
        tag, old = self._storages[key]
        if size < old:
            self._settle()
        self._storages[key] = (tag, size)
        self.live[tag] += size - old
        if tag not in ("offloaded", "batch"):
            self.live["total"] += size - old

    def _settle(self) -> None:
        """Update the peaks with the bytes that are in memory now. Call this just before the next operation, and not
        earlier. Some tags come late: FSDP2 allocates weights before it gathers them, and gradients before it sums them.
        """
        for name in ("activations", "weights", "total"):
            at = (name, self.window)
            self.peaks[at] = max(self.peaks[at], self.live[name])

    def _use_briefly(self, size: int) -> None:
        """Count ``size`` bytes that an operation allocates and frees before it returns."""
        if size:
            self._find_gradients_and_weights()
            self.live.update({"activations": size, "total": size})
            self._settle()
            self.live.subtract({"activations": size, "total": size})

    def _forget(self, key: int) -> None:
        self._resize_to(key, 0)
        del self._storages[key], self._references[key]

    def _counting_resize(self) -> Callable[[torch.UntypedStorage, int], Any]:
        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            result = self._resize(storage, size)
            if (key := id(storage)) in self._storages:
                tag, old = self._storages[key]
                if tag == "activations":
                    self._storages[key] = ("weights", old)
                    self.live["activations"] -= old
                    self.live["weights"] += old
                self._resize_to(key, size)
            return result

        return resize_and_count


def capped_in_turn(name: str, args: tuple[Any, ...]) -> Callable[[], Any] | None:
    """Return a function that runs soft-capped attention as several separate operations. The recorder can then count the
    memory of each of them.

    Return None for any other operation, and if attention is limited to documents.
    """
    if name == "attend_documents" and len(args) > 6 and args[6] and args[3] is None:
        q, k, v, _, scale, window, softcap = args[:7]
        return lambda: attend_in_turn(q, k, v, KeyLimits(None, window), AttentionScores(scale, softcap))
    if name == "attend_documents_backward" and args[6] is None and args[9]:
        scale, window, softcap = args[7:]
        return lambda: differentiate_in_turn(
            args[:5], args[5], KeyLimits(None, window), AttentionScores(scale, softcap)
        )
    return None


def workspace_of(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Return how many bytes the backward pass of attention allocates on a GPU and frees before it returns.

    Return 0 for any other operation.

    On Hopper, torch uses cuDNN unless sequences are packed or windowed. cuDNN reports the size of its workspace only at
    run time, so this function returns the size of FlashAttention's workspace instead. Attention with a mask or in
    float32 uses torch's memory-efficient kernel. For this kernel, the function returns 0, because its workspace is
    small: at most about one float32 copy of the queries of one block.
    """
    if options.get("attn_mask") is not None:
        return 0
    if name == "attend_documents_backward":
        (sequences, tokens, heads, width), (_, keys, key_heads, _), ends = args[1].shape, args[2].shape, args[6]
        documents = sequences if ends is None else ends.numel()
    elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        (sequences, heads, tokens, width), (_, key_heads, keys, _), documents = args[1].shape, args[2].shape, None
    else:
        return 0
    has_kernel = args[1].element_size() == 2 and width <= WIDEST_FLASH
    return flash_backward_bytes(sequences, tokens, keys, heads, key_heads, width, documents) if has_kernel else 0


def flash_backward_bytes(
    sequences: int, tokens: int, keys: int, heads: int, key_heads: int, width: int, documents: int | None = None
) -> int:
    """Return how many bytes FlashAttention 2's backward pass allocates in addition to the gradients of q, k, and v.

    This memory holds a float32 accumulator for dQ, and one float32 value per query and head. With grouped heads, it
    also holds dK and dV for each query head. The rule follows ``mha_bwd`` and ``mha_varlen_bwd`` in torch's
    aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.

    Args:
        sequences: Number of sequences.
        tokens: Number of queries in a sequence.
        keys: Number of keys in a sequence.
        heads: Number of query heads.
        key_heads: Number of key heads.
        width: Size of one head.
        documents: Number of packed documents. None means one dense call for all sequences.
    """
    rows = sequences * -(-tokens // 128) * 128 if documents is None else sequences * tokens + 128 * documents
    multiple, padded_width = (32 if width <= 128 else 64), -(-width // 8) * 8
    accumulated = 4 * rows * heads * (-(-padded_width // multiple) * multiple + 1)
    expanded = 2 * 2 * sequences * keys * heads * padded_width if key_heads != heads else 0
    return accumulated + expanded
