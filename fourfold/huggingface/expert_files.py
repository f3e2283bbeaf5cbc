"""Convert experts between transformers' modules and files on the Hub. In a module, one parameter holds all experts of a
layer. In files, each expert has its own matrices."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fourfold.parallel.other_models.plan_styles import saved_buffers

RowRanges = dict[str, range]
"""For one parameter, maps the name of each tensor in files to the parameter's rows that this tensor holds. Rows are
numbered across all stacked experts."""


def rows_in_files(model: Any) -> dict[str, RowRanges]:
    """For each parameter and each saved buffer of a model, find the tensors that hold it in files.

    A table in transformers says which stacks of experts become one matrix per expert, and which parameters have another
    name in files. If files hold a parameter's elements in another order, or join it with other parameters, the result
    has the parameter's own name instead of names in files.

    Args:
        model: A transformers model.

    Returns:
        For each parameter, by name, the tensors in files. A parameter with several names has several entries.
    """
    found: dict[str, RowRanges] = {}
    for name, parameter in (*model.named_parameters(remove_duplicate=False), *saved_buffers(model).items()):
        counts = tuple(parameter.shape[: 2 if parameter.ndim == 3 else 1])
        rows = range(math.prod(counts))
        found[name] = {name: rows}
        if not hasattr(model, "base_model_prefix") or not counts or not rows:
            continue
        from transformers.core_model_loading import revert_weight_conversion

        inner = parameter.shape[len(counts) :]
        numbers = torch.arange(len(rows)).view(*counts, *(1 for _ in inner))
        # Converting copies rows, and never mixes columns. So two columns are enough to find the new order of the rows.
        parts = revert_weight_conversion(model, {name: numbers.expand(*counts, *(min(size, 2) for size in inner))})
        places = {theirs: part.flatten(0, part.ndim - len(inner) - 1) for theirs, part in parts.items() if part.numel()}
        firsts = {theirs: part.reshape(len(part), -1)[:, 0].tolist() for theirs, part in places.items()}
        runs = {theirs: range(rows_of[0], rows_of[-1] + 1) for theirs, rows_of in firsts.items()}
        if runs and all([*runs[theirs]] == rows_of for theirs, rows_of in firsts.items()):
            found[name] = runs
    # If one tensor in the files joins several parameters, keep the names of the parameters.
    uses = Counter(theirs for runs in found.values() for theirs in runs)
    joined = [name for name, runs in found.items() if any(uses[theirs] > 1 for theirs in runs)]
    return found | {name: {name: range(sum(map(len, found[name].values())))} for name in joined}


def in_modules(model: Any, rows: Mapping[str, RowRanges], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert all tensors in a model's files to the model's weights. The keys of the result are the weights' names in
    the modules.

    The result is differentiable.

    Args:
        model: The model.
        rows: The result of ``rows_in_files`` for the model.
        tensors: The tensors, by their names in files.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found = {n: tensors[min(rows[n])] for n, _ in model.named_buffers() if n in rows and min(rows[n]) in tensors}
    others = {}
    for name, parameter in model.named_parameters():
        in_order = sorted(rows[name], key=lambda theirs: rows[name][theirs].start)
        if in_order[0] in tensors:
            found[name] = torch.cat([tensors[theirs] for theirs in in_order]).view_as(parameter)
        else:
            others[name] = parameter
    if not others:
        return found
    # Files join or transpose these parameters. To find where each element goes, number the elements, and let
    # transformers convert the numbers instead of weights.
    sizes = [parameter.numel() for parameter in others.values()]
    numbers = zip(others, torch.arange(sum(sizes)).split(sizes), strict=True)
    parts = revert_weight_conversion(model, {name: part.view_as(others[name]) for name, part in numbers})
    places = torch.cat([part.flatten() for part in parts.values()]).argsort()
    elements = torch.cat([tensors[theirs].flatten() for theirs in parts])[places].split(sizes)
    return found | {name: part.view_as(others[name]) for name, part in zip(others, elements, strict=True)}
