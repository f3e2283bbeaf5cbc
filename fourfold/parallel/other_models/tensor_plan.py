"""Split any model over the tensor axes x and y. Each module has a style that says how to split it (``plan_styles``)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Axis, Grid
from fourfold.parallel.other_models.conv1d import INPUT_FIRST, InputFirst, as_linear
from fourfold.parallel.other_models.plan_styles import IN_SHARES, enclosing, groups_of, parent_of, styles_of
from fourfold.parallel.other_models.split_experts import split_experts
from fourfold.parallel.other_models.whole_residual import ColumnLinear, Entrance, RowLinear, WholeEmbedding
from fourfold.parallel.tensor.linear import OverY
from fourfold.parallel.tensor.sharding import Tile

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

SCALED_EMBEDDING = "ScaledWordEmbedding"
"""Suffix of the class names of some embeddings in transformers. These embeddings multiply their output by
``embed_scale``, as in Gemma."""

_HEAD_SIZES = ("head_dim", "head_size")
"""Names of attributes that hold the head size in attention modules of transformers."""

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
"""Names of attributes that hold the number of heads in attention modules. We do not change these attributes, so they
count the heads of all ranks."""


@dataclass(frozen=True)
class Placed:
    """How one module is split."""

    name: str
    style: str
    """The module's style (``plan_styles``)."""
    over_y: OverY | None = None
    """How the ranks of y hold the features between the layers of the module's group. None if the module was not
    replaced."""


def lay_out(model: nn.Module, grid: Grid, rules: Mapping[str, str]) -> list[Placed]:
    """Replace the modules of a model with parallel layers that hold this rank's tiles.

    Styles come from ``rules`` if a rule matches, and otherwise from the model's published plan.

    Returns:
        How each module is split.

    Raises:
        UserError: ``styles_of`` finds no valid styles, a module does not support its style, or a size is not divisible
            by an axis. Or the model has dropout or another source of randomness. Ranks that repeat the same work would
            then get different results.
    """
    styles = styles_of(model, grid, rules)
    _check_nothing_random(model)
    split = {parent: _over_y(model, parent, styles, grid) for parent in sorted(groups_of(styles))}
    entries: dict[str, Entrance] = {}
    placed: list[Placed] = []
    for name, style in styles.items():
        parent, module = parent_of(name), model.get_submodule(name)
        over_y: OverY = split[parent] if style in IN_SHARES else "replicate"
        new: nn.Module | None = None
        if style in ("colwise", "colwise_in_parts", "colwise_gather_output"):
            in_parts = style == "colwise_in_parts"
            linear = _in_parts(name, model, grid, over_y) if in_parts else _linear(name, module, style)
            _check_divides(name, linear, out_features=grid.x, in_features=grid.y)
            entry = entries.setdefault(parent, Entrance(grid, parent or name))
            new = ColumnLinear(linear, grid, over_y, entry, style == "colwise_gather_output", name)
        elif style in ("rowwise", "rowwise_split_input"):
            linear = _linear(name, module, style)
            _check_divides(name, linear, in_features=grid.x, out_features=grid.y)
            new = RowLinear(linear, grid, over_y, style == "rowwise_split_input", name)
        elif style == "embedding":
            if type(module) is not nn.Embedding and not type(module).__name__.endswith(SCALED_EMBEDDING):
                raise _wrong_type(name, module, "Embedding", style)
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                raise UserError(f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse cannot be split")
            _check_divides(name, module, num_embeddings=grid.x, embedding_dim=grid.y)
            new = WholeEmbedding(module, grid, name, getattr(module, "embed_scale", None))
        elif style == "experts":
            split_experts(module, grid, name)
        elif style == "replicated_with_grad_allreduce":
            over_y = split.get(enclosing(name, split) or "", "replicate")
            axes = ("x", "y") if over_y == "features" else ("x",)
            tiles = {key: Tile(partial_over=axes) for key, _ in module.named_parameters(recurse=False)}
            setattr(module, "tiles", tiles)  # noqa: B010 (mypy rejects an assignment)
        if new is not None:
            model.set_submodule(name, new)
        placed.append(Placed(name, style, None if new is None else over_y))
    return placed


def _over_y(model: nn.Module, group: str, styles: Mapping[str, str | None], grid: Grid) -> OverY:
    """Return how the layers of a group split their features over y.

    If all widths and numbers of heads are divisible by x·y, both x and y split the features ("features"). Otherwise
    only x splits them ("replicate").

    Raises:
        UserError: A number of heads is not divisible by x, or attention has no attribute with its head size.
    """
    ranks = grid.x.size * grid.y.size
    parent = model.get_submodule(group)
    heads = _heads(model) if any(hasattr(parent, key) for key in _HEAD_SIZES) else {}
    for key, count in heads.items():
        if count % grid.x.size:
            works = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise UserError(f"{group}: {key} = {count} cannot be split over x = {grid.x.size}; x = {works} work")
    widths = [
        linear.in_features if style == "rowwise" else linear.out_features
        for name, style in styles.items()
        if parent_of(name) == group and style in IN_SHARES
        if (linear := as_linear(model.get_submodule(name))) is not None
    ]
    over_y: OverY = "features" if all(n % ranks == 0 for n in [*heads.values(), *widths]) else "replicate"
    is_attention = any(hasattr(parent, key) for key in (*_HEAD_COUNTS, "split_size"))
    has_size = any(key.endswith(_HEAD_SIZES) for key in dir(parent))
    is_cut = grid.x.size > 1 or (over_y == "features" and grid.y.size > 1)
    if is_attention and not has_size and is_cut:
        raise UserError(
            f"{group} ({type(parent).__name__}) has no {' or '.join(_HEAD_SIZES)}, so its code may divide one rank's "
            "features by the number of all heads; with 'colwise_gather_output' and 'rowwise_split_input', it gets all "
            "features"
        )
    return over_y


def _heads(model: nn.Module) -> dict[str, int]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    return {key: count for key, count in found.items() if isinstance(count, int)}


def _check_nothing_random(model: nn.Module) -> None:
    for name, module in model.named_modules():
        rates = {f"{name}.{key}": value for key, value in vars(module).items() if "dropout" in key or "jitter" in key}
        if isinstance(module, DROPOUTS):
            rates[f"{name}.p"] = module.p
        for where, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                raise UserError(
                    f"{where} = {rate} gives different results on ranks that repeat the same work; set it to 0"
                )


def _wrong_type(name: str, module: nn.Module, kind: str, style: str) -> UserError:
    return UserError(
        f"{name} has the type {type(module).__name__}, but '{style}' is only for nn.{kind}; with 'replicate', every "
        "rank computes the whole module"
    )


def _linear(name: str, module: nn.Module, style: str) -> nn.Linear:
    if (linear := as_linear(module)) is None:
        raise _wrong_type(name, module, "Linear", style)
    return linear


def _in_parts(name: str, model: nn.Module, grid: Grid, over_y: OverY) -> nn.Linear:
    """Return an ``InputFirst`` in parts for a layer that computes queries, keys, and values together.

    The parent module cuts the layer's output into parts of ``split_size`` features. So set this attribute of the parent
    to the size of a part on this rank.

    Raises:
        UserError: The layer is not a ``Conv1D``, or its parent has no ``split_size`` that divides its output features.
    """
    attention: Any = model.get_submodule(parent_of(name))
    width = getattr(attention, "split_size", None)
    linear = as_linear(model.get_submodule(name))
    if not isinstance(linear, InputFirst) or not isinstance(width, int) or linear.out_features % width:
        raise UserError(
            f"{name}: 'colwise_in_parts' is for a {INPUT_FIRST} whose module cuts its features into parts of split_size"
        )
    attention.split_size = width // grid.x.size // (grid.y.size if over_y == "features" else 1)
    return InputFirst(model.get_submodule(name), linear.out_features // width)


def _check_divides(name: str, module: nn.Module, **over: Axis) -> None:
    """Check that each size of a module is divisible by the size of its axis.

    Raises:
        UserError: A size is not divisible.
    """
    for size, axis in over.items():
        number: int = getattr(module, size)
        if number % axis.size:
            works = ", ".join(str(n) for n in range(1, 4 * axis.size) if number % n == 0)
            raise UserError(
                f"{name}: {size} = {number} cannot be split over {axis.name} = {axis.size}; {axis.name} = {works} "
                f"work, and so does {size} = {-(-number // axis.size) * axis.size}"
            )
