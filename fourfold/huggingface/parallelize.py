"""Put any causal language model on the grid, for your own training loop: ``fourfold.parallelize(model, grid)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from fourfold.errors import UserError
from fourfold.huggingface.expert_files import rows_in_files
from fourfold.huggingface.parallelized import Parallelized
from fourfold.huggingface.parallelized_files import ParallelizedTensors
from fourfold.huggingface.peft_layers import is_adapter, name_in_files, take_adapters
from fourfold.models.dtypes import DTYPES, SAFETENSORS_NAMES
from fourfold.parallel.data.data_parallel import StepTypes, Units
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid_model import GridModel, replicate_or_shard
from fourfold.parallel.other_models.plan_styles import saved_buffers
from fourfold.parallel.other_models.tensor_plan import lay_out
from fourfold.parallel.other_models.whole_residual import WholeEmbedding
from fourfold.parallel.tensor.sharding import tie_again, tied_names
from fourfold.torch_internals import unsaved_buffers

PRECISIONS = ("fp32", "bf16")
"""The dtypes that a step can compute in."""


def parallelize(
    model: nn.Module,
    grid: Grid,
    rules: Mapping[str, str] | None = None,
    weights: str | Path | None = None,
    precision: str | None = None,
    weight_prefetch: int = 1,
) -> Parallelized:
    """Put a causal language model on the grid, for your own training loop. Every process must call this.

    Args:
        model: A model of transformers, with or without LoRA adapters of peft, or any ``nn.Module`` with ``rules``. Its
            weights must be the same on every process. A model on the meta device needs ``weights``.
        grid: The processes, arranged along axes. Only the axes x, y, z, and dp may be larger than 1.
        rules: Maps patterns of module names to styles (``plan_styles.STYLES``), which say how a module is split. The
            rules take precedence over the model's own plan.
        weights: A folder of safetensors (default: the weights that the model has). Each process reads only its own
            slices.
        precision: The dtype that the step computes in, "fp32" or "bf16" (default: the dtype of the weights).
        weight_prefetch: Number of blocks whose weights are gathered ahead of the computation (default 1).

    Returns:
        The model on the grid.

    Raises:
        UserError: The grid, the model's weights, or an option is not supported, or a module cannot be put on the grid.
            In the last case, the message names the module, and ``model`` is partly replaced and unusable.
    """
    for axis in ("cp", "pp", "ep"):
        if (size := getattr(grid.sizes, axis)) > 1:
            raise UserError(f"{axis} = {size}: fourfold.parallelize splits models over x, y, z and dp only")
    model, adapter = take_adapters(model)
    sources = {name: parameter.detach() for name, parameter in model.named_parameters()}
    _make_buffers(model)
    buffers = dict(model.named_buffers())
    types = _step_types(model, precision)
    _check_saved_buffers(model)
    if adapter is not None and weights is not None:
        raise UserError(
            f"weights = {weights} has no weights of the adapters; load the model first, and leave weights out"
        )
    if weights is None and any(parameter.is_meta for parameter in sources.values()):
        raise UserError(
            "the model has no weights (it is on the meta device); give parallelize the folder of its weights"
        )
    tied = tied_names(model)
    shapes = {name: tuple(source.shape) for name, source in (sources | saved_buffers(model)).items()}
    rows = rows_in_files(model)
    rows |= {name: {name_in_files(name): range(shapes[name][0])} for name in rows if is_adapter(name)}
    in_files = ParallelizedTensors(shapes, rows, tied)
    placed = lay_out(model, grid, rules or {})
    model.to("meta")
    tie_again(model, tied)
    # The user's optimizer updates the model's parameters. So these must be the stored weights, not working copies in
    # the compute dtype.
    stage = replicate_or_shard(model, _units(model), grid, types, weight_prefetch, working_copies=False)
    device = torch.device("cpu" if grid.device_type == "cpu" else f"cuda:{torch.cuda.current_device()}")
    on_grid = GridModel({0: stage}, grid, device)
    # Allocating memory has overwritten the buffers, so restore their values.
    for name, buffer in buffers.items():
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, buffer.to(device))
    parallelized = Parallelized(on_grid, placed, in_files, adapter)
    if weights is None:
        parallelized.fill(sources)
    else:
        parallelized.fill_from(Path(weights))
    return parallelized


def _step_types(model: nn.Module, precision: str | None) -> StepTypes:
    """Return the dtypes of a step. Raise ``UserError`` unless all trained weights have the same floating-point dtype,
    and all frozen weights have the same floating-point dtype."""
    trained, frozen = ({p.dtype for p in model.parameters() if p.requires_grad is each} for each in (True, False))
    for types in (trained, frozen):
        if len(types) > 1 or not all(each.is_floating_point for each in types):
            raise UserError(
                f"the weights have several dtypes ({', '.join(sorted(map(str, types)))}); convert the model to one "
                "dtype"
            )
    if precision not in (None, *PRECISIONS):
        raise UserError(
            f"precision = {precision!r}: a step computes in {' or '.join(PRECISIONS)}; fp16 would need loss scaling"
        )
    (stored,), (computed,) = trained or frozen, frozen or trained
    working = computed if precision is None else DTYPES[precision]
    if computed not in (stored, working):
        raise UserError(f"precision = {precision!r}: the frozen weights have the dtype {computed}; leave precision out")
    return StepTypes(stored, working, torch.promote_types(working, torch.float32))


def _units(model: nn.Module) -> Units:
    """Group the model's modules into units, whose weights are gathered together: the blocks of the largest
    ``ModuleList``, the embeddings outside that list, and all other leaf modules with weights outside that list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()), default=nn.ModuleList())
    inside = {module for block in blocks for module in block.modules()}
    outside = [m for m in model.modules() if m not in inside and any(True for _ in m.parameters(recurse=False))]
    leaves = [module for module in outside if not any(True for _ in module.children())]
    embeddings: list[nn.Module] = [module for module in leaves if isinstance(module, (nn.Embedding, WholeEmbedding))]
    return Units(embeddings, list(blocks), [module for module in leaves if module not in embeddings])


def _check_saved_buffers(model: nn.Module) -> None:
    """Refuse buffers that are saved with the weights if the forward pass changes them, or if they are not
    floating-point."""
    for name, buffer in saved_buffers(model).items():
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, (nn.BatchNorm1d, nn.SyncBatchNorm)):
            raise UserError(f"{name} is a statistic of the sequences, so processes would compute different values")
        if buffer.dtype not in SAFETENSORS_NAMES:
            raise UserError(
                f"{name} is a buffer of type {buffer.dtype} that is saved with the weights, but parallelize can save "
                "only floating-point numbers; such models are not supported"
            )


def _make_buffers(model: nn.Module) -> None:
    """Give values to the buffers that are on the meta device, with transformers' ``_init_weights``.

    Buffers that are saved with the weights are read from files later.

    ``_init_weights`` would also initialize the parameters of the same modules. So it is called only for modules whose
    parameters are all on the meta device and have no values yet.
    """
    for name, module in model.named_modules():
        buffers = {key: buffer for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        made = {
            key: torch.full_like(buffer, float("nan") if buffer.is_floating_point() else 0, device="cpu")
            for key, buffer in buffers.items()
        }
        for key, buffer in made.items():
            setattr(module, key, buffer)
        initialize = getattr(model, "_init_weights", None)
        is_safe = all(parameter.is_meta for parameter in module.parameters(recurse=False))
        if made and is_safe and initialize is not None:
            initialize(module)
        computed = [buffer for key, buffer in made.items() if key in unsaved_buffers(module)]
        if computed and (initialize is None or not is_safe or any(buffer.isnan().any() for buffer in computed)):
            raise UserError(
                f"{name} has buffers on the meta device, which nothing can fill; build the model on the CPU"
            )
