"""Choose how to split every module of any model over the tensor axes x and y. This choice is the module's *style*.

A *plan* is a table from patterns of module names to styles. Models of transformers publish such plans.

A *group* is a module that contains split layers, such as an attention module. If no pattern matches a module, every
rank computes the whole module. If a published plan cannot split one of the modules in a group, every rank computes the
whole group.
"""

import fnmatch
import logging
import tomllib
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.other_models.conv1d import as_linear
from fourfold.parallel.other_models.split_experts import is_stack
from fourfold.torch_internals import unsaved_buffers

log = logging.getLogger("fourfold.styles")

_TABLES = tomllib.loads((files("fourfold.parallel.other_models") / "styles.toml").read_text(encoding="utf-8"))
STYLES: dict[str, str] = _TABLES["styles"]
"""The styles that a plan may use, and what each of them does."""
SYNONYMS: dict[str, str] = _TABLES["synonyms"]
PLANS: dict[str, dict[str, str]] = _TABLES["plans"]
"""fourfold's plans by model_type."""

IN_SHARES = ("colwise", "colwise_in_parts", "rowwise")
"""Styles of layers that write or read split features. In a group, "rowwise" layers read what "colwise" layers write."""


def styles_of(model: nn.Module, grid: Grid, rules: Mapping[str, str]) -> dict[str, str]:
    """Return the style of every module that has weights of its own.

    The style comes from ``rules`` if a rule matches the module, and otherwise from the model's published plan. If no
    style splits a module with matrices, every rank holds the whole matrices. This function then prints a warning.

    Raises:
        UserError: No module can be split, a rule matches no module, a rule has an unknown style, or rules split only
            some layers of a group.
    """
    with_weights = [name for name, m in model.named_modules() if any(True for _ in m.parameters(recurse=False))]
    for pattern in rules:
        if not fnmatch.filter(with_weights, pattern):
            raise UserError(
                f"no module with weights matches the rule '{pattern}'; one module with weights is {with_weights[0]}"
            )
    by_rule = {name: _style(name, rules) for name in with_weights}
    for name, style in by_rule.items():
        if style is not None and style not in STYLES:
            raise UserError(f"{name}: the style '{style}' of its rule is unknown; known styles are {', '.join(STYLES)}")
    plan = published_plan(model)
    published = {name: _splittable(model, name, _style(name, plan)) for name in with_weights}
    return _completed(model, by_rule, published, grid)


def published_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that a transformers model publishes. Add styles for the input embedding, head, and routers.

    For a model of another library, the plan is empty.
    """
    plan: dict[str, str] = dict(getattr(model, "_tp_plan", None) or {})
    prefix = getattr(model, "base_model_prefix", "")
    config = getattr(model, "config", None)
    of_config = getattr(config, "base_model_tp_plan", None) or {}
    of_config = PLANS.get(getattr(config, "model_type", ""), {}) | of_config
    plan |= {f"{prefix}.{key}": style for key, style in of_config.items()}
    # Plans do not mention routers. Replicate them, so that all ranks choose the same experts.
    plan |= {name: "replicate" for name, m in model.named_modules() if type(m).__name__.endswith("Router")}
    names = {module: name for name, module in model.named_modules()}
    for getter, style in (("get_input_embeddings", "embedding"), ("get_output_embeddings", "colwise_gather_output")):
        module = getattr(model, getter)() if hasattr(model, getter) else None
        if module in names:
            plan.setdefault(names[module], style)
    return plan


def _style(name: str, plan: Mapping[str, str]) -> str | None:
    """Look up the style of a module: by the module's exact name if the plan has it, and otherwise by the longest
    matching pattern. Return None if no pattern matches."""
    matching = [pattern for pattern in plan if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        return None
    style = plan[max(matching, key=lambda pattern: (pattern == name, len(pattern)))]
    return SYNONYMS.get(style, style)


def _splittable(model: nn.Module, name: str, style: str | None) -> str | None:
    """Return the style if this module can be split in this way, and otherwise None."""
    module = model.get_submodule(name)
    if style == "experts":
        return style if is_stack(module) else None
    if style is not None and style.startswith(("colwise", "rowwise")):
        return style if as_linear(module) is not None or type(module) is nn.Linear else None
    return style if style in STYLES else None


def _completed(
    model: nn.Module, by_rule: Mapping[str, str | None], published: Mapping[str, str | None], grid: Grid
) -> dict[str, str]:
    """Give every module a style.

    A module without a style gets "replicate", and so do all modules of its group. If the group stayed split, the module
    would read only one rank's features, and its gradient would be partial. All modules of a group also get "replicate"
    if the group has buffers that are saved with the weights.
    """
    styles = {name: style or published[name] for name, style in by_rule.items()}
    groups = groups_of(styles)
    group_of = {name: group for name in styles if (group := enclosing(name, groups)) is not None}
    whole = {parent_of(name) for name in saved_buffers(model)}
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
    """Return whether each rank would compute only a part of this module's gradient, because its group is split."""
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
    if matrices and dist.get_rank() == 0:
        log.warning(
            "no style splits %d modules with matrices, such as %s, so every rank of x and y stores and computes "
            "these modules in full",
            len(matrices),
            matrices[0],
        )


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are saved with the weights, by name."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in unsaved_buffers(module)
    }


def is_of_residual(
    model: nn.Module, styles: Mapping[str, str | None], group: str, shapes: Mapping[str, list[int]]
) -> bool:
    """Return whether all weights of a module are vectors with the width of the residual stream.

    Such a module is a norm of the residual stream. Every rank computes the whole norm, so its gradient is complete.

    Args:
        group: the module's group, whose layers read the residual stream.
        shapes: the shapes of the module's weights.
    """
    read = {
        linear.in_features
        for name, style in styles.items()
        if style in ("colwise", "colwise_in_parts") and parent_of(name) == group
        if (linear := as_linear(model.get_submodule(name))) is not None
    }
    return all(len(shape) == 1 and shape[0] in read for shape in shapes.values())


def groups_of(styles: Mapping[str, str | None]) -> set[str]:
    """Return the groups: the modules that directly contain a layer with split features (``IN_SHARES``)."""
    return {parent_of(name) for name, style in styles.items() if style in IN_SHARES}


def enclosing(name: str, groups: Iterable[str]) -> str | None:
    """Return the outermost group that contains a module, or None if no group contains the module."""
    return min((group for group in groups if f"{name}.".startswith(f"{group}.")), key=len, default=None)


def parent_of(name: str) -> str:
    """Return the name of the module's parent."""
    return name.rpartition(".")[0]
