"""Lay out any model on x and y, with a table (plan) that says how to split the modules that match a pattern.
transformers' models publish such plans.

Every rank computes a module whole if no pattern names it. If the published plan cannot split a module of a group of
layers, every rank computes the whole group.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Axis, Grid
from fourfold.parallel.other_models.conv1d import INPUT_FIRST, InputFirst, as_linear
from fourfold.parallel.other_models.split_experts import is_stack, split_experts
from fourfold.parallel.other_models.whole_residual import ColumnLinear, Entrance, RowLinear, WholeEmbedding
from fourfold.parallel.tensor.linear import OverY
from fourfold.parallel.tensor.sharding import Tile

STYLES: dict[str, str] = {
    "colwise": "a linear layer that reads the residual; each rank gets a share of its output features",
    "colwise_in_parts": "as colwise, for one weight [in, out] of queries, keys, and values",
    "colwise_gather_output": "as colwise, and then every rank gathers all features",
    "rowwise": "a linear layer that reads each rank's share of the features, and writes to the residual",
    "rowwise_split_input": "as rowwise, but every rank has all features and takes its share",
    "embedding": "an embedding table",
    "experts": "the stacked experts of an MoE layer; every rank computes some of them for all tokens",
    "replicated_with_grad_allreduce": "small weights that every rank applies to its share of the features",
    "replicate": "computed whole by every rank",
}
"""The styles that a table may name. They have transformers' names if transformers has them."""

log = logging.getLogger("fourfold.parallelize")

M = TypeVar("M", bound=nn.Module)

SYNONYMS = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "embedding_rowwise": "embedding",
    "vocab_parallel_embedding": "embedding",
    "replicated": "replicate",
    "moe_tp_experts": "experts",
}

IN_SHARES = ("colwise", "colwise_in_parts", "rowwise")
"""Styles of layers with features that stay split from one layer to the next."""

PLANS = {
    "gpt2": {
        "h.*.attn.c_attn": "colwise_in_parts",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
        "wpe": "embedding",
    },
    "gpt_oss": {"layers.*.mlp.experts": "experts"},
}
"""Plans by model_type, for what the plans of transformers leave out."""

SCALED_EMBEDDING = "ScaledWordEmbedding"
"""Suffix of the class names of transformers' embeddings whose output is multiplied by their ``embed_scale``, such as
Gemma's."""

_HEAD_SIZES = ("head_dim", "head_size")
"""Names of the attributes with the head size in transformers' attention modules."""

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
"""Names of the attributes with the number of heads in attention modules. They keep the number of the whole model."""


@dataclass(frozen=True)
class Placed:
    """The layout of one module: its style, and how its group of layers places features over y."""

    name: str
    style: str
    over_y: OverY | None = None


def published_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that a transformers model publishes, completed with its input embedding and head.

    Returns an empty plan if the model publishes none.
    """
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    config = getattr(model, "config", None)
    of_config = getattr(config, "base_model_tp_plan", None) or {}
    of_config = PLANS.get(getattr(config, "model_type", ""), {}) | of_config
    plan |= {f"{prefix}.{key}": style for key, style in of_config.items()}
    # Plans do not name routers. Each rank keeps the whole router, so all ranks send a token to the same experts.
    plan |= {name: "replicate" for name, m in model.named_modules() if type(m).__name__.endswith("Router")}
    names = {module: name for name, module in model.named_modules()}
    for getter, style in (("get_input_embeddings", "embedding"), ("get_output_embeddings", "colwise_gather_output")):
        module = getattr(model, getter)() if hasattr(model, getter) else None
        if module in names:
            plan.setdefault(names[module], style)
    return plan


def lay_out(model: nn.Module, grid: Grid, rules: Mapping[str, str]) -> list[Placed]:
    """Replace modules by their parts on this rank. Styles come from ``rules``, or otherwise from the published plan.

    A warning names a matrix that every rank of x and y computes whole because it has no style.

    Returns:
        The layout of every module.

    Raises:
        UserError: Nothing can be split, a rule splits only some layers of a group or matches no module, a size does
            not divide evenly, a style is unknown, or a module is random and would differ between ranks that must
            compute the same result.
    """
    with_weights = [name for name, module in model.named_modules() if _has_own_parameters(module)]
    for pattern in rules:
        if not fnmatch.filter(with_weights, pattern):
            raise UserError(f"no module with weights matches the rule '{pattern}', such as {with_weights[0]}")
    by_rule = {name: _style(name, rules) for name in with_weights}
    for name, style in by_rule.items():
        if style is not None and style not in STYLES:
            raise UserError(f"{name}: the style '{style}' of its rule is not supported; {', '.join(STYLES)} are")
    plan = published_plan(model)
    published = {name: _splittable(model, name, _style(name, plan)) for name in with_weights}
    styles = _completed(model, by_rule, published, grid)
    _check_nothing_random(model)
    split = {parent: _over_y(model, parent, styles, grid) for parent in sorted(_groups(styles))}
    entries: dict[str, Entrance] = {}
    placed: list[Placed] = []
    for name, style in styles.items():
        parent, module = _parent(name), model.get_submodule(name)
        over_y: OverY = split[parent] if style in IN_SHARES else "replicate"
        if style in ("colwise", "colwise_in_parts", "colwise_gather_output"):
            in_parts = style == "colwise_in_parts"
            linear = _in_parts(name, model, grid, over_y) if in_parts else _linear(name, module, style)
            _check_divides(name, linear, out_features=grid.x, in_features=grid.y)
            entry = entries.setdefault(parent, Entrance(grid, parent or name))
            new: nn.Module = ColumnLinear(linear, grid, over_y, entry, style == "colwise_gather_output", name)
        elif style in ("rowwise", "rowwise_split_input"):
            linear = _linear(name, module, style)
            _check_divides(name, linear, in_features=grid.x, out_features=grid.y)
            new = RowLinear(linear, grid, over_y, style == "rowwise_split_input", name)
        elif style == "embedding":
            if not type(module).__name__.endswith(SCALED_EMBEDDING):
                _of_type(name, module, nn.Embedding, style)
            if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
                raise UserError(f"{name}: an embedding with max_norm, scale_grad_by_freq or sparse cannot be split")
            _check_divides(name, module, num_embeddings=grid.x, embedding_dim=grid.y)
            new = WholeEmbedding(module, grid, name, getattr(module, "embed_scale", None))
        elif style == "experts":
            split_experts(module, grid, name)
            placed.append(Placed(name, style))
            continue
        else:
            if style == "replicated_with_grad_allreduce":
                over_y = split.get(_enclosing(name, split) or "", "replicate")
                axes = ("x", "y") if over_y == "features" else ("x",)
                tiles = {key: Tile(partial_over=axes) for key, _ in module.named_parameters(recurse=False)}
                setattr(module, "tiles", tiles)  # noqa: B010 (types forbid it on a module of another class)
            placed.append(Placed(name, style))
            continue
        _set_module(model, name, new)
        placed.append(Placed(name, style, over_y))
    return placed


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """Return the style of a module. It is listed under the module's name, or under the longest pattern that matches the
    name."""
    matching = [pattern for pattern in plan if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        return None
    style = plan[max(matching, key=lambda pattern: (pattern == name, len(pattern)))]
    return SYNONYMS.get(style, style)


def _splittable(model: nn.Module, name: str, style: str | None) -> str | None:
    """Return a style of the published plan, or None if this module cannot be split that way."""
    module = model.get_submodule(name)
    if style == "experts":
        return style if is_stack(module) else None
    if style is not None and style.startswith(("colwise", "rowwise")):
        return style if as_linear(module) is not None or type(module) is nn.Linear else None
    return style if style in STYLES else None


def _completed(
    model: nn.Module, by_rule: Mapping[str, str | None], published: Mapping[str, str | None], grid: Grid
) -> dict[str, str]:
    """Give every module a style. A module without one is computed whole ("replicate"), and so is the group of layers
    around it, because the gradient of a whole module inside a split group would be partial."""
    styles = {name: style or published[name] for name, style in by_rule.items()}
    groups = _groups(styles)
    group_of = {name: group for name in styles if (group := _enclosing(name, groups)) is not None}
    whole = {_parent(name) for name in saved_buffers(model)}
    for name, group in group_of.items():
        if _is_partial(model, styles, name, group):
            if any(by_rule[each] for each in group_of if group_of[each] == group):
                raise _unfinished_group(model, styles, name, group)
            whole.add(group)
    split_styles = (*IN_SHARES, "replicated_with_grad_allreduce")
    complete = {
        name: "replicate" if style is None or (group_of.get(name) in whole and style in split_styles) else style
        for name, style in styles.items()
    }
    if grid.x.size * grid.y.size > 1:
        get_head: Any = getattr(model, "get_output_embeddings", lambda: None)
        split = [name for name, style in complete.items() if style.startswith(("colwise", "rowwise", "experts"))]
        if not any(by_rule[name] or model.get_submodule(name) is not get_head() for name in split):
            raise UserError(
                f"{type(model).__name__} publishes no tensor-parallel plan; give parallelize a table of module "
                "patterns, such as {'layers.*.attention.query': 'colwise', 'layers.*.attention.output': 'rowwise'}"
            )
        _warn_of_whole_matrices(model, [name for name in styles if complete[name] == "replicate" != by_rule[name]])
    return complete


def _is_partial(model: nn.Module, styles: Mapping[str, str | None], name: str, group: str) -> bool:
    """Return whether a module of a split group would get only a part of its gradient."""
    shapes = {key: list(p.shape) for key, p in model.get_submodule(name).named_parameters(recurse=False)}
    is_whole = styles[name] == "replicate" and not is_of_residual(model, styles, group, shapes)
    return styles[name] is None or is_whole


def _unfinished_group(model: nn.Module, styles: Mapping[str, str | None], name: str, group: str) -> UserError:
    module = model.get_submodule(name)
    key, parameter = next(module.named_parameters(recurse=False))
    problem = "has no style" if styles[name] is None else "cannot be 'replicate'"
    return UserError(
        f"{name} ({type(module).__name__}, {key} {list(parameter.shape)}), inside a group of sharded layers, "
        f"{problem}: its gradient would cover only one rank's features; 'replicated_with_grad_allreduce' sums it, and "
        f"'replicate' for all modules of {group} computes the whole group on every rank"
    )


def _warn_of_whole_matrices(model: nn.Module, names: list[str]) -> None:
    matrices = [name for name in names if any(p.ndim > 1 for p in model.get_submodule(name).parameters(recurse=False))]
    matrices = [name for name in matrices if not type(model.get_submodule(name)).__name__.endswith("Router")]
    if matrices:
        log.warning(
            "no style splits %d modules with matrices, such as %s; every rank of x and y holds and computes them whole",
            len(matrices),
            matrices[0],
        )


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with the weights, by name."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def is_of_residual(
    model: nn.Module, styles: Mapping[str, str | None], group: str, shapes: Mapping[str, list[int]]
) -> bool:
    """Return whether vectors are as wide as the residual stream that the group's layers read.

    Such vectors belong to a norm in the same module, and every rank computes this norm whole.
    """
    read = {
        linear.in_features
        for name, style in styles.items()
        if style in ("colwise", "colwise_in_parts") and _parent(name) == group
        if (linear := as_linear(model.get_submodule(name))) is not None
    }
    return all(len(shape) == 1 and shape[0] in read for shape in shapes.values())


def _groups(styles: Mapping[str, str | None]) -> set[str]:
    """Return the modules with a layer that is split by columns or rows. The features inside such a module are
    split."""
    return {_parent(name) for name, style in styles.items() if style in IN_SHARES}


def _enclosing(name: str, groups: Any) -> str | None:
    return min((group for group in groups if f"{name}.".startswith(f"{group}.")), key=len, default=None)


def _over_y(model: nn.Module, group: str, styles: Mapping[str, str | None], grid: Grid) -> OverY:
    """Return how a group's layers place their features: over x and y if all its layers and heads divide evenly over
    both, or otherwise over x alone."""
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
        if _parent(name) == group and style in IN_SHARES
        if (linear := as_linear(model.get_submodule(name))) is not None
    ]
    over_y: OverY = "features" if all(n % ranks == 0 for n in [*heads.values(), *widths]) else "replicate"
    is_attention = any(hasattr(parent, key) for key in (*_HEAD_COUNTS, "split_size"))
    has_size = any(key.endswith(_HEAD_SIZES) for key in dir(parent))
    is_cut = grid.x.size > 1 or (over_y == "features" and grid.y.size > 1)
    if is_attention and not has_size and is_cut:
        raise UserError(
            f"{group} ({type(parent).__name__}) has no {' or '.join(_HEAD_SIZES)}, so it may cut a rank's share of the "
            "heads into the number of all heads; 'colwise_gather_output' and 'rowwise_split_input' keep heads whole"
        )
    return over_y


def _heads(model: nn.Module) -> dict[str, int]:
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = {key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")}
    return {key: count for key, count in found.items() if isinstance(count, int)}


def _check_nothing_random(model: nn.Module) -> None:
    for name, module in model.named_modules():
        random = {key: value for key, value in vars(module).items() if "dropout" in key or "jitter" in key}
        rates = {f"{name}.{key}": value for key, value in random.items()}
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates[f"{name}.p"] = module.p
        for where, rate in rates.items():
            if isinstance(rate, float) and rate > 0:
                raise UserError(f"{where} = {rate} would differ between ranks that repeat the same work; set it to 0")


def _of_type(name: str, module: nn.Module, kind: type[M], style: str) -> M:
    if type(module) is not kind:
        raise UserError(
            f"{name} is a {type(module).__name__}, and '{style}' is for nn.{kind.__name__} only; with 'replicate' "
            "every rank computes it whole"
        )
    assert isinstance(module, kind)
    return module


def _linear(name: str, module: nn.Module, style: str) -> nn.Linear:
    linear = as_linear(module)
    return _of_type(name, module, nn.Linear, style) if linear is None else linear


def _in_parts(name: str, model: nn.Module, grid: Grid, over_y: OverY) -> nn.Linear:
    """Describe a layer whose features its module cuts into parts of ``split_size``.

    The attribute ``split_size`` becomes this rank's size.
    """
    attention: Any = model.get_submodule(_parent(name))
    width = getattr(attention, "split_size", None)
    linear = as_linear(model.get_submodule(name))
    if not isinstance(linear, InputFirst) or not isinstance(width, int) or linear.out_features % width:
        raise UserError(
            f"{name}: 'colwise_in_parts' is for a {INPUT_FIRST} whose module cuts its features into parts of split_size"
        )
    attention.split_size = width // grid.x.size // (grid.y.size if over_y == "features" else 1)
    return InputFirst(model.get_submodule(name), linear.out_features // width)


def _check_divides(name: str, module: nn.Module, **over: Axis) -> None:
    """Raise ``UserError`` if a size of the module does not divide evenly over its axis."""
    for size, axis in over.items():
        number: int = getattr(module, size)
        if number % axis.size:
            works = ", ".join(str(n) for n in range(1, 4 * axis.size) if number % n == 0)
            raise UserError(
                f"{name}: {size} = {number} cannot be split over {axis.name} = {axis.size}; {axis.name} = {works} "
                f"work, and so does {size} = {-(-number // axis.size) * axis.size}"
            )


def _has_own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    setattr(model.get_submodule(_parent(name)), name.rpartition(".")[2], module)
