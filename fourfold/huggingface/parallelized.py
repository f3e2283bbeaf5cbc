"""A model that ``fourfold.parallelize`` has put on the grid: forward, backward, clip, gather, save, and load."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fourfold.config.model import IGNORE_INDEX
from fourfold.errors import UserError
from fourfold.huggingface.packed_documents import separates_documents
from fourfold.huggingface.parallelized_files import (
    ParallelizedTensors,
    read_checkpoint,
    read_numbers,
    read_weights,
    write_checkpoint,
    write_pretrained,
)
from fourfold.models.autograd import differentiable
from fourfold.parallel.grid.communicate import all_reduce
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.parallel.grid_model import GridModel
from fourfold.parallel.other_models.plan_styles import saved_buffers
from fourfold.parallel.other_models.tensor_plan import Placed
from fourfold.parallel.state import LocalShard
from fourfold.parallel.tensor.sharding import Tile
from fourfold.torch_internals import tensors_in


class Parallelized(nn.Module):
    """A model on the grid. Call it like the original model, with the sequences of this process.

    The model runs all collectives itself. Three calls in your training loop change, because torch's own functions know
    nothing about the tensor axes x and y: ``backward(loss)`` replaces ``loss.backward()``, ``clip_grad_norm_`` replaces
    torch's function, and ``save`` and ``load`` replace ``state_dict``.

    Attributes:
        module: The model. Layers of the grid have replaced its own layers.
        grid: The grid.
        shards: This process's part of every parameter.
        shapes: The shape of every parameter before the model was put on the grid.
    """

    def __init__(
        self, on_grid: GridModel, placed: list[Placed], in_files: ParallelizedTensors, adapter: Any = None
    ) -> None:
        """Wrap a model on the grid.

        Args:
            on_grid: The model. It has a single pipeline stage.
            placed: The layout of each module.
            in_files: How the model's tensors are stored in files, determined before the model was put on the grid.
            adapter: peft's configuration of the model's LoRA adapters, if it has any.
        """
        super().__init__()
        self.on_grid, self.placed, self.stage = on_grid, placed, on_grid.stages[0]
        self.module, self.grid, self.shards = self.stage.model, on_grid.grid, on_grid.shards
        self._in_files, self.shapes, self._adapter = in_files, in_files.shapes, adapter
        self._in_backward = False
        self._summed = False
        self._separates_documents: bool | None = None
        """Whether packed documents are computed separately. None if this is not known yet."""
        taken = inspect.signature(self.module.forward).parameters
        names_none = any(each.kind is each.VAR_KEYWORD for each in taken.values())
        self._takes_use_cache = "use_cache" in taken or (names_none and hasattr(self.module, "base_model_prefix"))
        self.module.register_forward_hook(self._after_forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's own outputs. With ``labels``, the loss is the mean over the labeled tokens of all
        processes.

        If a step has several micro-batches, pass ``num_items_in_batch``, as in transformers. It is the sum of
        ``count(labels)`` over all micro-batches. The loss of a micro-batch is then the sum over its labeled tokens,
        divided by ``num_items_in_batch``.

        If the ``position_ids`` of a row start again, the row holds packed documents, which do not attend to each other.
        transformers separates documents only without a key-value cache, so by default, the cache is off if you pass
        labels or if gradients are enabled.

        Args:
            args: Arguments of the model, with the sequences of this process.
            kwargs: Keyword arguments of the model.

        Raises:
            UserError: The model's own loss is not next-token prediction or has an auxiliary loss of routers, or packed
                documents would attend to each other.
        """
        labels = kwargs.get("labels")
        if labels is not None:
            kind = getattr(self.module, "loss_type", "ForCausalLM")
            # If the class names no loss, the kind is None, and transformers computes a next-token loss.
            if kind not in ("ForCausalLM", None):
                raise UserError(
                    f"the model's own loss ({kind}) is not next-token prediction; compute the loss from its logits"
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
            # Make ``loss.backward()`` raise an error, because it would leave the gradients unsummed.
            for output in tensors_in(outputs):
                if output.requires_grad:
                    output.register_hook(self._check_in_backward)
        return outputs

    def _separate_documents(self, kwargs: dict[str, Any]) -> None:
        """If the caller has not set ``use_cache``, switch the key-value cache off if there are labels or gradients.
        Refuse packed documents that would attend to each other."""
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        mask = mask if mask is not None and mask.ndim == 2 else None
        if kwargs.get("use_cache") is None and (kwargs.get("labels") is not None or torch.is_grad_enabled()):
            kwargs["use_cache"] = False
        if positions is None:
            return
        if self._separates_documents is None:
            self._separates_documents = separates_documents(self.module, positions.device)
        # Most models keep packed documents apart if they get neither a mask nor a cache. In this case, skip the check
        # below, because it would wait for the GPU in every step.
        if self._separates_documents and mask is None and kwargs.get("use_cache") is False:
            return
        again = positions[..., 1:] <= positions[..., :-1]
        # Positions of padding may have any value, so ignore them.
        if mask is not None:
            again = again & mask[:, 1:].bool() & mask[:, :-1].bool()
        if not again.any():
            return
        if not self._separates_documents:
            raise UserError(
                "position_ids start again, but a packed document of this model sees the documents before it, because "
                "a layer keeps a state across documents or the model's mask does not read position_ids; put one "
                "document in each row"
            )
        if kwargs.get("use_cache"):
            raise UserError(
                "use_cache = True with position_ids that start again lets packed documents attend to each other; "
                "leave use_cache out"
            )
        if mask is not None:
            raise UserError(
                "an attention_mask with position_ids that start again lets packed documents attend to each other; "
                "leave the mask out, and set the labels of padding to -100"
            )
        kwargs["use_cache"] = False

    def _check_no_auxiliary_loss(self, wanted: bool | None) -> None:
        """Refuse an auxiliary loss of routers, because transformers would compute it from each process's own sequences
        only."""
        by_default = getattr(getattr(self.module, "config", None), "output_router_logits", False)
        if self.grid.batch.size > 1 and (by_default if wanted is None else wanted):
            raise UserError(
                "output_router_logits = True adds a loss that is not a sum over sequences, and each of z·dp = "
                f"{self.grid.batch.size} processes would compute its own loss; set output_router_logits = False"
            )

    def rows(self, batch: Tensor) -> Tensor:
        """Return this process's sequences of a batch that every process has.

        Args:
            batch: The batch [B, …]. Its first dim is divided over z and dp.

        Raises:
            UserError: B is not divisible by z·dp.
        """
        axis = self.grid.batch
        if len(batch) % axis.size:
            raise UserError(f"a batch of {len(batch)} sequences cannot be divided over z·dp = {axis.size}")
        return batch.chunk(axis.size)[axis.rank]

    def count(self, labels: Tensor) -> Tensor:
        """Return the number of tokens that the loss includes, summed over all processes.

        Args:
            labels: Labels [B, S] of this process. IGNORE_INDEX (-100) marks tokens that the loss leaves out.
        """
        return all_reduce((labels[..., 1:] != IGNORE_INDEX).sum(), self.grid.tokens, "kept tokens")

    def total(self, share: Tensor) -> Tensor:
        """Return the sum of a loss over all processes that hold different sequences. The result has no gradient.

        Args:
            share: This process's loss, a scalar.
        """
        return all_reduce(share.detach().clone(), self.grid.tokens, "loss")

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Compute the gradients of a loss. Call this instead of ``loss.backward()``.

        Args:
            loss: The loss of one micro-batch, a scalar.
            last: Whether this is the last micro-batch of the step. The backward pass of the last micro-batch completes
                the sums of gradients over all processes.

        Raises:
            UserError: The previous step's gradients were not cleared, so they would be summed over ranks again.
        """
        if self._summed and any(shard.grad is not None and shard.grad.any() for shard in self.shards):
            raise UserError(
                "the gradients are complete, and would be summed over processes again; call backward(loss, last=False) "
                "for all micro-batches of a step but the last, and zero_grad() after the step"
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
            self.on_grid.finish_gradients()
            self._take_gradients_in(self.stage.types.stored)

    def _take_gradients_in(self, dtype: torch.dtype) -> None:
        """Cast the gradients to ``dtype``. Gradients are summed in float32, but torch's optimizers need them in the
        dtype of the weights."""
        for shard in self.shards:
            parameter = shard.parameter
            if parameter.requires_grad and parameter.dtype != self.stage.types.gradient:
                total, parameter.grad = parameter.grad, None
                parameter.grad_dtype = dtype
                parameter.grad = None if total is None else total.to(dtype)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients down if their norm over all processes exceeds ``max_norm``. Call this instead of torch's
        function.

        Args:
            max_norm: The largest norm.

        Returns:
            The norm before clipping, a scalar.
        """
        return self.on_grid.clip_gradients(max_norm)

    def gather(self, gradients: bool = False) -> dict[str, Tensor] | None:
        """Return the full weights, or the full gradients, by name on rank 0. Return None on all other ranks.

        All tensors must fit into the memory of rank 0, so use this only for small models.

        Args:
            gradients: Whether to gather the gradients instead of the weights.

        Raises:
            UserError: A weight has no gradient.
        """
        found = self.on_grid.gather(gradients)
        return None if found is None else {name: whole.view(self.shapes[name]) for name, whole in found.items()}

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Set all weights.

        Args:
            weights: The full weights by name, as ``gather`` returns them, on every process.
        """
        with self.on_grid.replacing_weights():
            for shard in self.shards:
                shard.local.copy_(weights[shard.name].reshape(shard.global_shape)[shard.slices])

    def fill_from(self, folder: Path) -> None:
        """Set all weights from files. Every process reads only the slices that it needs.

        Args:
            folder: A folder of safetensors.

        Raises:
            UserError: A weight is missing, or a file is damaged. Every process raises this error.
        """
        with self.on_grid.replacing_weights(), failing_together():
            read_weights(self.module, self._saved(), self._in_files, folder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a folder for transformers' ``from_pretrained``. If the model has LoRA adapters, write only these, for
        ``peft.PeftModel.from_pretrained``. Rank 0 gathers and writes one tensor at a time.

        Args:
            folder: The folder to write. It must not exist.

        Raises:
            UserError: ``folder`` exists or cannot be written. Every process raises this error.
        """
        write_pretrained(self.module, self._saved(), self._in_files, Path(folder), self._adapter)

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint that any grid can load. It replaces an earlier checkpoint in ``folder``.

        Args:
            folder: The checkpoint's folder.
            optimizer: If given, its state is saved too.

        Raises:
            UserError: ``folder`` is not a checkpoint or cannot be written, or the optimizer keeps a tensor that has
                neither the weight's shape nor one element. Every process raises this error.
        """
        write_checkpoint(self._saved(), self.grid, Path(folder), optimizer)

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Fill the weights from a checkpoint that any grid has written.

        Args:
            folder: The checkpoint's folder.
            optimizer: If given, its state is filled too.

        Raises:
            UserError: ``folder`` is not an undamaged checkpoint of this model, or it has no state for the optimizer.
        """
        numbers = read_numbers(Path(folder), optimizer is not None)
        with self.on_grid.replacing_weights():
            read_checkpoint(self._saved(), Path(folder), optimizer, numbers)

    def _saved(self) -> list[LocalShard]:
        """Return the shards of all weights, and then one shard for each buffer that is saved with the weights. Every
        rank has full buffers, so a buffer's shard is the full buffer."""
        shards, tile, copies = list(self.shards), Tile(sharded=False), self.grid.sizes.world_size
        for name, buffer in saved_buffers(self.module).items():
            parameter, shape = nn.Parameter(buffer, requires_grad=False), tuple(buffer.shape)
            shards.append(LocalShard(name, parameter, buffer, tile, shape, tile.slices(shape, self.grid), copies))
        return shards

    def layout(self) -> list[dict[str, Any]]:
        """Return one record for each module. A record says how the module is split over x and y."""
        return [asdict(placed) for placed in self.placed]

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Free the gathered weights if no backward pass will free them, so that the next forward pass gathers the
        updated weights."""
        if not torch.is_grad_enabled():
            self.on_grid.free_gathered()

    def _check_in_backward(self, grad: Tensor) -> None:
        if not self._in_backward:
            raise UserError(
                "loss.backward() leaves gradients unsummed on a grid; call backward(loss) of the parallelized model"
            )
