"""Anybody's model on the grid, for a training loop of one's own: ``fourfold.parallelize(model, grid)``."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from fourfold.checkpoints.global_tensors import load_tensors, save_tensors
from fourfold.config.model import IGNORE_INDEX
from fourfold.data.files import new_folder, swap_in
from fourfold.errors import UserError
from fourfold.models.dtypes import DTYPES
from fourfold.models.tensor_files import Entry, TensorFiles, write_tensor_files
from fourfold.parallel.communicate import all_reduce
from fourfold.parallel.data_parallel import DataParallel, StepTypes, Units
from fourfold.parallel.fully_sharded import FullySharded
from fourfold.parallel.grid import Grid
from fourfold.parallel.replicated import Replicated
from fourfold.parallel.state import GlobalView, LocalShard, clip_gradients, gather_full, sum_partial_gradients
from fourfold.parallel.tensor_plan import Placed, lay_out, tie_again, tied_names
from fourfold.parallel.whole_residual import WholeEmbedding

PROGRESS_FILE = "parallelized.json"
"""Of a checkpoint: the numbers that an optimizer keeps beside tensors."""


PRECISIONS = ("fp32", "bf16")
"""In which a step may compute."""


def parallelize(
    model: nn.Module,
    grid: Grid,
    rules: Mapping[str, str] | None = None,
    weights: str | Path | None = None,
    precision: str | None = None,
    weight_prefetch: int = 1,
) -> Parallelized:
    """Put a causal language model on the grid, for a training loop of one's own. Every process must call this.

    model: of transformers, or any ``nn.Module`` with ``rules``; its weights must be the same on every process, or on
    the meta device with ``weights`` naming a folder of safetensors of which each process reads its slices. rules:
    patterns of module names to styles (``tensor_plan.STYLES``), before those that the model publishes. precision: in
    which the step computes (fp32, bf16), by default the type of the weights. weight_prefetch: blocks gathered ahead.

    Raises ``UserError`` naming what cannot be laid out; the model is in parts then, and no longer of use.
    """
    for axis in ("cp", "pp"):
        if grid.axis(axis).size > 1:
            raise UserError(f"{axis} = {grid.axis(axis).size}: models that are not ours go over x, y, z and dp only")
    sources = {name: parameter.detach() for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    stored = _one_type(sources)
    if precision not in (None, *PRECISIONS):
        raise UserError(
            f"precision = {precision!r}: a step computes in {' or '.join(PRECISIONS)}; fp16 has no loss scaling"
        )
    working = stored if precision is None else DTYPES[precision]
    if weights is None and any(parameter.is_meta for parameter in sources.values()):
        raise UserError(
            "the model has no weights (it is on the meta device); give parallelize the folder of its weights"
        )
    tied = tied_names(model)
    placed = lay_out(model, grid, rules or {})
    model.to("meta")
    tie_again(model, tied)
    units, types = _units(model), StepTypes(stored, working, torch.float32)
    replicated = grid.z.size == 1 and (grid.sizes.zero == 0 or grid.replicas.size == 1) and working == stored
    stage: DataParallel = (
        Replicated(model, units, grid, types)
        if replicated
        else FullySharded(model, units, grid, types, weight_prefetch)
    )
    device = _device(grid)
    stage.materialize(device)
    _put_back_buffers(model, buffers, device)
    parallelized = Parallelized(stage, placed)
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

    def __init__(self, stage: DataParallel, placed: list[Placed]) -> None:
        super().__init__()
        self.module = stage.model
        self.stage, self.grid, self.placed = stage, stage.grid, placed
        self.shards: list[LocalShard] = stage.shards()
        self._view = GlobalView(stage.grid, stage.grid.sizes.zero)
        self._in_backward = False
        self._summed = False
        self.module.register_forward_hook(self._after_forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own outputs. With ``labels`` the loss is the mean over the kept tokens of all processes.

        ``num_items_in_batch`` divides instead, as in transformers, for a step of several micro-batches: give
        ``count(labels)`` summed over them.
        """
        labels = kwargs.get("labels")
        if labels is not None:
            kind = getattr(self.module, "loss_type", "ForCausalLM")
            if kind != "ForCausalLM":
                raise UserError(
                    f"the model's own loss ({kind}) is not one of next tokens; compute the loss from its logits"
                )
            if kwargs.get("num_items_in_batch") is None:
                kwargs["num_items_in_batch"] = self.count(labels).clamp(min=1)
        outputs = self.module(*args, **kwargs)
        if labels is not None:
            outputs.loss = _with_value(outputs.loss, self.total(outputs.loss))
        if torch.is_grad_enabled():
            tree_map_only(Tensor, self._guard, outputs)
        return outputs

    def rows(self, batch: Tensor) -> Tensor:
        """This process's share of a batch that every process has; dp and z share out its first dim."""
        axis = self.grid.batch
        if len(batch) % axis.size:
            raise UserError(f"a batch of {len(batch)} sequences cannot be shared out over z·dp = {axis.size}")
        return batch.chunk(axis.size)[axis.rank]

    def count(self, labels: Tensor) -> Tensor:
        """How many tokens the loss of these labels counts, over all processes."""
        return all_reduce((labels[..., 1:] != IGNORE_INDEX).sum(), self.grid.tokens, "kept tokens")

    def total(self, share: Tensor) -> Tensor:
        """The sum of the shares of all processes that have other sequences, without a gradient."""
        return all_reduce(share.detach().clone(), self.grid.tokens, "loss")

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Gradients of a loss; they add up until a backward that is the ``last`` of its step completes them.

        Raises ``UserError`` when those of a step that is complete still stand: they would be summed over ranks again.
        """
        if self._summed and any(shard.grad is not None and shard.grad.any() for shard in self.shards):
            raise UserError(
                "the gradients are complete, and would be summed over processes again; call backward(loss, last=False) "
                "for all micro-batches of a step but the last, and zero_grad() after it"
            )
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

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this norm, over all processes; returns the norm before."""
        return clip_gradients(self.shards, max_norm)

    def gather(self, gradients: bool = False) -> dict[str, Tensor] | None:
        """All weights, or gradients, whole and by name on rank 0, None elsewhere: for small models."""
        return gather_full(self.shards, [shard.grad if gradients else shard.local for shard in self.shards])

    @torch.no_grad()
    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Set all weights from whole tensors."""
        self.stage.free_gathered()
        for shard in self.shards:
            shard.local.copy_(weights[shard.name][shard.slices])
        self.stage.publish()

    @torch.no_grad()
    def fill_from(self, folder: Path) -> None:
        """Set all weights from a folder of safetensors; every process reads what it holds."""
        self.stage.free_gathered()
        files = TensorFiles(folder)
        prefix = f"{getattr(self.module, 'base_model_prefix', '')}."
        for shard in self.shards:
            name = next((n for n in (shard.name, shard.name.removeprefix(prefix)) if n in files.shapes), None)
            if name is None:
                raise UserError(f"{folder}: no file has the tensor {shard.name}")
            if files.shapes[name] != shard.global_shape:
                raise UserError(
                    f"{files.file_of[name]}: the tensor {name} has the shape {list(files.shapes[name])}, and the "
                    f"model's is {list(shard.global_shape)}"
                )
            if shard.local.numel():
                files.read_into(shard.local, name, shard.slices)
        self.stage.publish()

    def save_pretrained(self, folder: str | Path) -> None:
        """Write what transformers' ``from_pretrained`` opens, one tensor at a time through rank 0.

        Raises ``UserError`` on every process when ``folder`` exists or cannot be written; nothing of it is there then.
        """
        waiting = list(self.shards)

        def write() -> None:
            with new_folder(Path(folder)) as partial:
                self._write_configs(partial)
                entries = [
                    Entry(shard.name, shard.local.dtype, shard.global_shape, lambda: self._whole(waiting.pop(0)))
                    for shard in self.shards
                ]
                write_tensor_files(partial, entries)

        def gather_on() -> None:
            while waiting:  # the first process's share of what the others send, where it could not write
                self._whole(waiting.pop(0))

        _first_process(write, folder, gather_on)

    def _write_configs(self, folder: Path) -> None:
        """As transformers' ``save_pretrained`` does."""
        if not hasattr(self.module, "config"):
            return
        config = copy.deepcopy(self.module.config)
        config.dtype = self.shards[0].local.dtype
        # FSDP2 makes a class of its own of every module's.
        config.architectures = [next(c.__name__ for c in type(self.module).__mro__ if not issubclass(c, FSDPModule))]
        config.save_pretrained(folder)
        if getattr(self.module, "generation_config", None) is not None:
            self.module.generation_config.save_pretrained(folder)

    def _whole(self, shard: LocalShard) -> Tensor | None:
        whole = gather_full([shard], [shard.local])
        return None if whole is None else whole[shard.name]

    def save(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write a checkpoint that any grid can load: weights, and what the optimizer keeps for them.

        One that is there is replaced. Raises ``UserError`` on every process when ``folder`` is something else, cannot
        be written, or the optimizer keeps what belongs to no grid.
        """
        folder = Path(folder)
        partial = folder.with_name(f".{folder.name}.partial")
        tensors, numbers = self._tensors(optimizer)

        def prepare() -> None:
            if folder.exists() and not (folder / PROGRESS_FILE).is_file():
                raise UserError(f"{folder} exists and is no checkpoint of a parallelized model; choose another folder")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / PROGRESS_FILE).write_text(json.dumps(numbers) + "\n")

        _first_process(prepare, folder)
        save_tensors(tensors, partial)
        _first_process(lambda: swap_in(partial, folder), folder)

    def load(self, folder: str | Path, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Fill the weights, and the optimizer's state, from a checkpoint that any grid has written."""
        folder = Path(folder)
        try:
            numbers = json.loads((folder / PROGRESS_FILE).read_text())
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} is no checkpoint of a parallelized model: {error}") from None
        if optimizer is not None and not numbers:
            raise UserError(f"{folder} was saved without an optimizer; load it without one, to begin with a new one")
        if optimizer is not None:
            self._make_state(optimizer, numbers)
        tensors, _ = self._tensors(optimizer)
        self.stage.free_gathered()
        load_tensors(tensors, folder)
        self.stage.publish()

    def layout(self) -> list[dict[str, Any]]:
        """How every module lies on x and y, as records."""
        return [asdict(placed) for placed in self.placed]

    def _tensors(self, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Global tensors that alias the memory here; by parameter the numbers and the kinds of tensors beside them."""
        tensors: dict[str, Tensor] = {f"model.{shard.name}": self._view.of(shard) for shard in self.shards}
        numbers: dict[str, dict[str, Any]] = {}
        for shard in self.shards if optimizer is not None else []:
            state = optimizer.state.get(shard.parameter, {})
            numbers[shard.name] = {"numbers": {}, "tensors": []}
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
                    local = value.to_local() if isinstance(value, DTensor) else value
                    tensors[f"optimizer.{key}.{shard.name}"] = self._view.of(shard, local)
                    numbers[shard.name]["tensors"].append(key)
                elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                    numbers[shard.name]["numbers"][key] = float(value)
                else:
                    raise UserError(
                        f"{type(optimizer).__name__} keeps {key} of {shard.name}, which is neither of the weight's "
                        "shape nor one number: no other grid could read it; save the model without the optimizer"
                    )
        return tensors, numbers

    def _make_state(self, optimizer: torch.optim.Optimizer, numbers: Mapping[str, dict[str, Any]]) -> None:
        for shard in self.shards:
            if shard.name not in numbers:
                continue
            state = optimizer.state[shard.parameter]
            for key in numbers[shard.name]["tensors"]:
                state[key] = torch.zeros_like(shard.parameter, requires_grad=False)
            for key, value in numbers[shard.name]["numbers"].items():
                state[key] = torch.tensor(value)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """No backward comes that would drop gathered weights, and the next forward must see those stepped meanwhile."""
        if not torch.is_grad_enabled():
            self.stage.free_gathered()

    def _guard(self, output: Tensor) -> Tensor:
        """A backward that nobody completes would leave shares of gradients behind."""
        if output.requires_grad:
            output.register_hook(self._check_in_backward)
        return output

    def _check_in_backward(self, grad: Tensor) -> None:
        if not self._in_backward:
            raise UserError(
                "loss.backward() leaves gradients unsummed on a grid; call backward(loss) of the parallelized model"
            )


def _first_process(
    action: Callable[[], None], folder: str | Path, of_others: Callable[[], None] = lambda: None
) -> None:
    """Do on the first process what only it does, while the others do ``of_others``; a failure is told to all.

    Where it fails, the first does ``of_others`` as well, for they wait for it.
    """
    failure: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except OSError as error:
            failure = [f"cannot write {folder}: {error.strerror or error}"]
        except ValueError as error:  # ours, and of transformers for a configuration that it does not write
            failure = [str(error)]
    if dist.get_rank() != 0 or failure[0] is not None:
        of_others()
    dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise UserError(failure[0])


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, share: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def _with_value(share: Tensor, value: Tensor) -> Tensor:
    """``value``, with the gradient of ``share``."""
    return _WithValue.apply(share, value)


def _units(model: nn.Module) -> Units:
    """The longest list of blocks, the embeddings outside of it, and every other module that has weights of its own."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=[])
    inside = {module for block in blocks for module in block.modules()}
    outside = [m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))]
    leaves = [module for module in outside if not any(True for _ in module.children())]
    embeddings = [module for module in leaves if isinstance(module, (nn.Embedding, WholeEmbedding))]
    return Units(embeddings, list(blocks), [module for module in leaves if module not in embeddings])


def _one_type(weights: Mapping[str, Tensor]) -> torch.dtype:
    types = {weight.dtype for weight in weights.values()}
    if len(types) != 1 or not next(iter(types)).is_floating_point:
        raise UserError(
            f"the weights are of several types ({', '.join(sorted(map(str, types)))}); convert the model to one"
        )
    return types.pop()


def _device(grid: Grid) -> torch.device:
    return torch.device("cpu") if grid.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())


def _put_back_buffers(model: nn.Module, buffers: Mapping[str, Tensor], device: torch.device) -> None:
    """Materialising has emptied them. Those that were never made are made by transformers, which knows how."""
    for name, buffer in buffers.items():
        if not buffer.is_meta:
            parent, _, key = name.rpartition(".")
            model.get_submodule(parent)._buffers[key] = buffer.to(device)
    unmade = {name.rpartition(".")[0] for name, buffer in buffers.items() if buffer.is_meta}
    for name in sorted(unmade):
        module = model.get_submodule(name)
        if any(True for _ in module.parameters()) or not hasattr(model, "_init_weights"):
            raise UserError(f"{name} has buffers on the meta device, which nobody can fill; build the model on the CPU")
        model._init_weights(module)
