"""Any model on the grid, for training loops of your own: ``fourfold.parallelize(model, grid)``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from fourfold.config.model import IGNORE_INDEX
from fourfold.errors import UserError
from fourfold.huggingface.expert_files import rows_in_files
from fourfold.huggingface.parallelized_files import (
    ParallelizedTensors,
    read_checkpoint,
    read_numbers,
    read_weights,
    write_checkpoint,
    write_pretrained,
)
from fourfold.models.autograd import differentiable
from fourfold.models.dtypes import DTYPES
from fourfold.parallel.data.data_parallel import DataParallel, StepTypes, Units
from fourfold.parallel.data.fully_sharded import FullySharded
from fourfold.parallel.data.replicated import Replicated
from fourfold.parallel.grid.communicate import all_reduce
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.parallel.other_models.tensor_plan import Placed, lay_out
from fourfold.parallel.other_models.whole_residual import WholeEmbedding
from fourfold.parallel.state import LocalShard, clip_gradients, gather_full, sum_partial_gradients
from fourfold.parallel.tensor.sharding import tie_again, tied_names

PRECISIONS = ("fp32", "bf16")
"""Types in which a step may compute."""


def parallelize(
    model: nn.Module,
    grid: Grid,
    rules: Mapping[str, str] | None = None,
    weights: str | Path | None = None,
    precision: str | None = None,
    weight_prefetch: int = 1,
) -> Parallelized:
    """Put a causal language model on the grid, for a training loop of your own. Every process must call this.

    model: of transformers, or any ``nn.Module`` with ``rules``; its weights must be the same on every process, or on
    the meta device with ``weights`` naming a folder of safetensors of which each process reads its slices. rules:
    patterns of module names to styles (``tensor_plan.STYLES``), before those that the model publishes. precision: in
    which the step computes (fp32, bf16), by default the type of the weights. weight_prefetch: blocks gathered ahead.

    Raises ``UserError`` naming what cannot be laid out; the model is then partly replaced, and cannot be used.
    """
    for axis in ("cp", "pp", "ep"):
        if (size := getattr(grid.sizes, axis)) > 1:
            raise UserError(f"{axis} = {size}: fourfold.parallelize splits models over x, y, z and dp only")
    sources = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _make_buffers(model)
    buffers = dict(model.named_buffers())
    stored = _one_type(sources)
    if precision not in (None, *PRECISIONS):
        raise UserError(
            f"precision = {precision!r}: a step computes in {' or '.join(PRECISIONS)}; fp16 has no loss scaling"
        )
    _check_only_weights(model)
    working = stored if precision is None else DTYPES[precision]
    if weights is None and any(parameter.is_meta for parameter in sources.values()):
        raise UserError(
            "the model has no weights (it is on the meta device); give parallelize the folder of its weights"
        )
    tied = tied_names(model)
    layout = ParallelizedTensors(
        {name: tuple(source.shape) for name, source in sources.items()}, rows_in_files(model), tied
    )
    placed = lay_out(model, grid, rules or {})
    model.to("meta")
    tie_again(model, tied)
    units, types = _units(model), StepTypes(stored, working, torch.promote_types(working, torch.float32))
    replicated = grid.z.size == 1 and (grid.sizes.zero == 0 or grid.replicas.size == 1) and working == stored
    stage: DataParallel = (
        Replicated(model, units, grid, types)
        if replicated
        else FullySharded(model, units, grid, types, weight_prefetch)
    )
    device = _device(grid)
    stage.materialize(device)
    _put_back_buffers(model, buffers, device)
    parallelized = Parallelized(stage, placed, layout)
    if weights is None:
        parallelized.fill(sources)
    else:
        parallelized.fill_from(Path(weights))
    return parallelized


class Parallelized(nn.Module):
    """A model on the grid. Called as the model is, with the sequences of this process; all collectives are inside.

    Three calls of a training loop change: ``backward(loss)`` for ``loss.backward()``, ``clip_grad_norm_`` for torch's,
    and ``save`` and ``load`` for ``state_dict``, because torch's know nothing of x and y.
    """

    def __init__(self, stage: DataParallel, placed: list[Placed], in_files: ParallelizedTensors) -> None:
        """in_files: of the weights by name, as the model had them before."""
        super().__init__()
        self.module = stage.model
        self.stage, self.grid, self.placed = stage, stage.grid, placed
        self._in_files, self.shapes = in_files, in_files.shapes
        self.shards: list[LocalShard] = stage.shards()
        self._in_backward = False
        self._summed = False
        taken = inspect.signature(self.module.forward).parameters
        names_none = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        self._takes_use_cache = "use_cache" in taken or (names_none and hasattr(self.module, "base_model_prefix"))
        self.module.register_forward_hook(self._after_forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own outputs. With ``labels`` the loss is the mean over the kept tokens of all processes.

        ``num_items_in_batch`` divides instead, as in transformers, for a step of several micro-batches: give
        ``count(labels)`` summed over them. Documents whose ``position_ids`` begin anew do not attend to each other:
        transformers sees that only without a cache, so none is used with labels or in training.
        """
        labels = kwargs.get("labels")
        if labels is not None:
            kind = getattr(self.module, "loss_type", "ForCausalLM")
            if kind not in ("ForCausalLM", None):  # transformers takes it for a class that names no loss
                raise UserError(
                    f"the model's own loss ({kind}) is not one of next tokens; compute the loss from its logits"
                )
            self._check_no_auxiliary_loss(kwargs.get("output_router_logits"))
            if kwargs.get("num_items_in_batch") is None:
                kwargs["num_items_in_batch"] = self.count(labels).clamp(min=1)
        if self._takes_use_cache:
            self._separate_documents(kwargs)
        outputs = self.module(*args, **kwargs)
        if labels is not None:
            outputs.loss = differentiable(outputs.loss, self.total, lambda gradient_of_share: gradient_of_share)
        if torch.is_grad_enabled():
            tree_map_only(Tensor, self._guard, outputs)
        return outputs

    def _separate_documents(self, kwargs: dict[str, Any]) -> None:
        """Switch the cache off if nothing uses it; refuse packed documents that would attend to each other."""
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        mask = mask if mask is not None and mask.ndim == 2 else None
        if kwargs.get("use_cache") is None and (kwargs.get("labels") is not None or torch.is_grad_enabled()):
            kwargs["use_cache"] = False
        # Only a mask or a cache joins documents. Reading the positions without one would wait for the GPU in each step.
        if positions is None or (mask is None and kwargs.get("use_cache") is False):
            return
        again = positions[..., 1:] <= positions[..., :-1]
        if mask is not None:  # positions of padding mean nothing
            again = again & mask[:, 1:].bool() & mask[:, :-1].bool()
        if not again.any():
            return
        if kwargs.get("use_cache"):
            raise UserError(
                "use_cache = True with position_ids that begin anew lets documents attend to each other; leave it out"
            )
        if mask is not None:
            raise UserError(
                "an attention_mask with position_ids that begin anew lets documents attend to each other; "
                "leave the mask out, and set the labels of padding to -100"
            )
        kwargs["use_cache"] = False

    def _check_no_auxiliary_loss(self, wanted: bool | None) -> None:
        """Refuse a router's loss, which transformers would compute from each process's own sequences."""
        by_default = getattr(getattr(self.module, "config", None), "output_router_logits", False)
        if self.grid.batch.size > 1 and (by_default if wanted is None else wanted):
            raise UserError(
                f"output_router_logits = True adds a loss that is not a sum over sequences, and z·dp = "
                f"{self.grid.batch.size} processes would each compute one of their own; set it to False"
            )

    def rows(self, batch: Tensor) -> Tensor:
        """This process's share of a batch that every process has; dp and z share out its first dim."""
        axis = self.grid.batch
        if len(batch) % axis.size:
            raise UserError(f"a batch of {len(batch)} sequences cannot be divided over z·dp = {axis.size}")
        return batch.chunk(axis.size)[axis.rank]

    def count(self, labels: Tensor) -> Tensor:
        """The number of tokens that the loss of these labels counts, over all processes."""
        return all_reduce((labels[..., 1:] != IGNORE_INDEX).sum(), self.grid.tokens, "kept tokens")

    def total(self, share: Tensor) -> Tensor:
        """Sum a loss over all processes with sequences of their own, without a gradient."""
        return all_reduce(share.detach().clone(), self.grid.tokens, "loss")

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Gradients of a loss; they add up until a backward that is the ``last`` of its step completes them.

        Raises ``UserError`` when gradients of a completed step are still there: they would be summed over ranks again.
        """
        if self._summed and any(shard.grad is not None and shard.grad.any() for shard in self.shards):
            raise UserError(
                "the gradients are complete, and would be summed over processes again; call backward(loss, last=False) "
                "for all micro-batches of a step but the last, and zero_grad() after it"
            )
        if self._summed:
            self._take_gradients_in(self.stage.types.gradient)
        self._summed = last
        self.stage.begin_backward(last)
        self._in_backward = True
        try:
            loss.backward()
        finally:
            self._in_backward = False
        if last:
            self.stage.finish_gradients()
            sum_partial_gradients(self.shards, self.grid)
            self._take_gradients_in(self.stage.types.stored)

    def _take_gradients_in(self, dtype: torch.dtype) -> None:
        """Cast the gradients: sums are float32, and torch's optimizers need the type of the weights."""
        for shard in self.shards:
            parameter = shard.parameter
            if parameter.requires_grad and parameter.dtype != self.stage.types.gradient:
                total, parameter.grad = parameter.grad, None
                parameter.grad_dtype = dtype
                parameter.grad = None if total is None else total.to(dtype)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this norm, over all processes; returns the norm before."""
        return clip_gradients(self.shards, max_norm)

    def gather(self, gradients: bool = False) -> dict[str, Tensor] | None:
        """All weights, or gradients, whole and by name on rank 0, None elsewhere: for small models.

        Raises ``UserError`` for a weight without a gradient.
        """
        tensors = [shard.grad if gradients else shard.local for shard in self.shards]
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) < len(tensors):
            raise UserError("some weights have no gradient to gather; call backward(loss) first")
        found = gather_full(self.shards, present)
        return None if found is None else {name: whole.view(self.shapes[name]) for name, whole in found.items()}

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Set all weights from whole tensors."""
        self.stage.free_gathered()
        for shard in self.shards:
            shard.local.copy_(weights[shard.name].reshape(shard.global_shape)[shard.slices])
        self.stage.publish()

    @torch.no_grad()
    def fill_from(self, folder: Path) -> None:
        """Set all weights from a folder of safetensors; every process reads what it holds."""
        self.stage.free_gathered()
        with failing_together():
            read_weights(self.module, self.shards, self._in_files, folder)
        self.stage.publish()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what transformers' ``from_pretrained`` opens, one tensor at a time through rank 0.

        Raises ``UserError`` on every process when ``folder`` exists or cannot be written; nothing of it is there then.
        """
        write_pretrained(self.module, self.shards, self._in_files, Path(folder))

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint that any grid can load: weights, and what the optimizer keeps for them.

        One that is there is replaced. Raises ``UserError`` on every process when ``folder`` is something else, cannot
        be written, or the optimizer keeps what belongs to no grid.
        """
        write_checkpoint(self.shards, self.grid, Path(folder), optimizer)

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Fill the weights, and the optimizer's state, from a checkpoint that any grid has written."""
        numbers = read_numbers(Path(folder), optimizer is not None)
        self.stage.free_gathered()
        read_checkpoint(self.shards, Path(folder), optimizer, numbers)
        self.stage.publish()

    def layout(self) -> list[dict[str, Any]]:
        """The layout of every module on x and y, as records."""
        return [asdict(placed) for placed in self.placed]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free gathered weights where no backward will free them, so that the next forward gathers the updated ones."""
        if not torch.is_grad_enabled():
            self.stage.free_gathered()

    def _guard(self, output: Tensor) -> Tensor:
        """Have ``output`` refuse a backward other than ours, which would leave gradients unsummed."""
        if output.requires_grad:
            output.register_hook(self._check_in_backward)
        return output

    def _check_in_backward(self, grad: Tensor) -> None:
        if not self._in_backward:
            raise UserError(
                "loss.backward() leaves gradients unsummed on a grid; call backward(loss) of the parallelized model"
            )


def _units(model: nn.Module) -> Units:
    """The largest list of modules as blocks, the embeddings outside of it, and all others with weights of their own."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=nn.ModuleList())
    inside = {module for block in blocks for module in block.modules()}
    outside = [m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))]
    leaves = [module for module in outside if not any(True for _ in module.children())]
    embeddings: list[nn.Module] = [module for module in leaves if isinstance(module, (nn.Embedding, WholeEmbedding))]
    return Units(embeddings, list(blocks), [module for module in leaves if module not in embeddings])


def _check_only_weights(model: nn.Module) -> None:
    """Raise ``UserError`` for adapters, and for buffers that files keep among the weights."""
    if any(".lora_A." in name for name, _ in model.named_parameters()):
        raise UserError(
            "the model has adapters of peft, which no plan places; train LoRA with `fourfold train` ([lora] rank, "
            "model.from_hf), or call merge_and_unload() of the peft model first, to train all weights"
        )
    in_files = _buffers_in_files(model)
    if in_files:
        raise UserError(
            f"{in_files[0]} is a buffer that files keep among the weights, and parallelize neither reads nor "
            "writes it there; such models are not supported"
        )


def _buffers_in_files(model: nn.Module) -> list[str]:
    """The names of the buffers that files keep among the weights."""
    return [
        f"{prefix}.{name}".removeprefix(".")
        for prefix, module in model.named_modules()
        for name, _ in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _one_type(weights: Mapping[str, Tensor]) -> torch.dtype:
    types = {weight.dtype for weight in weights.values()}
    if len(types) != 1 or not next(iter(types)).is_floating_point:
        raise UserError(
            f"the weights are of several types ({', '.join(sorted(map(str, types)))}); convert the model to one"
        )
    return types.pop()


def _device(grid: Grid) -> torch.device:
    return torch.device("cpu") if grid.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _make_buffers(model: nn.Module) -> None:
    """Give buffers on the meta device their values, which ``_init_weights`` of transformers knows.

    Parameters of the same modules must be on the meta device too, where initializing them does nothing.
    """
    for name, module in model.named_modules():
        buffers = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        made = {
            key: torch.full_like(buffer, float("nan") if buffer.is_floating_point() else 0, device="cpu")
            for key, buffer in buffers.items()
        }
        module._buffers.update(made)
        initialize = getattr(model, "_init_weights", None)
        is_safe = all(parameter.is_meta for parameter in module.parameters(recurse=False))
        if made and is_safe and initialize is not None:
            initialize(module)
        if made and (initialize is None or not is_safe or any(buffer.isnan().any() for buffer in made.values())):
            raise UserError(
                f"{name} has buffers on the meta device, and no way to fill them; build the model on the CPU"
            )


def _put_back_buffers(model: nn.Module, buffers: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the buffers that materializing has emptied."""
    for name, buffer in buffers.items():
        parent, _, key = name.rpartition(".")
        model.get_submodule(parent)._buffers[key] = buffer.to(device)
