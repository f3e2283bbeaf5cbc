"""Split a transformers model's experts over the tensor axes x and y: each rank computes some experts for all tokens.

The model's own code runs with stacks of only this rank's experts, [E / (x·y), …]. Experts of other ranks get the index
E / (x·y), one past this rank's last expert. The model's code skips tokens whose expert has this index. The expert
parallelism of transformers works in the same way.
"""

from typing import Any

import torch
from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.parallel.grid.communicate import sum_gradient, sum_of
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.sharding import Tile

STACK = "is_concatenated"
"""Name of the attribute that marks stacks of experts. The decorator ``use_experts_implementation`` of transformers sets
it."""

SKIPS_OTHERS = "_is_expert_parallel"
"""Name of the attribute that makes a stack skip tokens of experts on other ranks. Before transformers 5.21, stacks
always skipped such tokens."""


def is_stack(module: nn.Module) -> bool:
    """Return whether a module is a stack of experts that can be split.

    Such a module has the attribute ``STACK``, and each of its own weights has one slice per expert in the first dim.
    """
    sizes = {tuple(weight.shape[:1]) for weight in module.parameters(recurse=False)}
    return hasattr(module, STACK) and sizes == {(getattr(module, "num_experts", 0),)}


def split_experts(module: Any, grid: Grid, name: str) -> None:
    """Keep only this rank's experts in a stack of experts (``is_stack``), and add hooks around its forward pass.

    The stack reads tokens [N, H], the indices of their chosen experts [N, K], and factors for the experts' outputs
    [N, K]. It returns outputs [N, H]. Every rank reads all tokens and computes its own experts. The hooks sum the
    outputs of all ranks.

    Raises:
        UserError: The module is not a stack, it contains modules with weights, or the number of experts is not
            divisible by x·y.
    """
    over_both = grid.axis("y_x")
    weights = dict(module.named_parameters(recurse=False))
    count: int = getattr(module, "num_experts", 0)
    if not is_stack(module):
        raise UserError(
            f"{name} ({type(module).__name__}) is not a stack of experts that can be split; with 'replicate', every "
            "rank computes all of it"
        )
    if sum(1 for _ in module.parameters()) > len(weights):
        raise UserError(f"{name} ({type(module).__name__}) contains modules with weights, which 'experts' cannot split")
    if count % over_both.size:
        works = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise UserError(f"{name}: {count} experts cannot be split over x·y = {over_both.size}; x·y = {works} work")
    module.tiles = {key: Tile(x=0, y=0) for key in weights}
    for key, weight in weights.items():
        local = torch.empty(module.tiles[key].local_shape(tuple(weight.shape), grid), dtype=weight.dtype, device="meta")
        module.register_parameter(key, nn.Parameter(local, weight.requires_grad))
    here = count // over_both.size
    first = (grid.x.rank * grid.y.size + grid.y.rank) * here
    module.num_experts = here
    setattr(module, SKIPS_OTHERS, over_both.size > 1)

    def enter(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x_NH, chosen_NK, weights_NK = inputs
        x_NH = sum_gradient(x_NH, over_both, f"{name}: input gradient")
        weights_NK = sum_gradient(weights_NK, over_both, f"{name}: router gradient")
        chosen_NK = chosen_NK - first
        elsewhere_NK = (chosen_NK < 0) | (chosen_NK >= here)
        return x_NH, chosen_NK.masked_fill(elsewhere_NK, here), weights_NK.masked_fill(elsewhere_NK, 0)

    def leave(module: nn.Module, inputs: Any, out_NH: Tensor) -> Tensor:
        # If no token chose this rank's experts, the experts' weights would get no gradient. So add an empty sum of each
        # weight to the output. The gradients are then zero.
        nothing = sum(weight[:0].sum() for weight in module.parameters())
        return sum_of(out_NH + nothing, over_both, f"{name}: outputs")

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)
