"""The matrix products of the blocks' linear layers in 8-bit floats, by torchao (arXiv 2209.05433).

Weights, their gradients and everything between the products stay in the step's bf16. The two operands of each product
are scaled by their largest absolute value (of the whole tile, or of each row) and rounded to float8 just before it.
Every rank scales its own tiles, so that no maximum is exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fourfold.errors import UserError
from fourfold.extras import import_extra
from fourfold.models.transformer import Transformer
from fourfold.parallel.tensor.linear import Linear4D
from fourfold.parallel.tensor.matmuls import Matmuls

if TYPE_CHECKING:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.config import CastConfig

FIRST_CAPABILITY = (8, 9)
"""Compute capability of NVIDIA GPUs that multiply float8: Ada and Hopper."""


def use_float8(model: Transformer, recipe: str) -> None:
    """Let the linear layers of the blocks multiply in float8; the head, embeddings and norms stay as they are.

    Args:
        recipe: torchao's name: ``"tensorwise"`` is the fastest, ``"rowwise"`` closer to bf16, and
            ``"rowwise_with_gw_hp"`` closer still, with weight gradients in bf16.

    Raises:
        UserError: torchao is not installed.
    """
    import_extra("torchao.float8", "float8", f"training.float8 = '{recipe}' needs")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    products = Float8Matmuls(config)
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, Linear4D):
                module.matmuls = products
        # Where x and y are 1 some layers stay torch's own, which torchao itself replaces.
        convert_to_float8_training(block, config=config)


def require_float8(device: torch.device) -> None:
    """Raise ``UserError`` where the device has no float8 matrix products."""
    if device.type == "cpu":
        raise UserError("training.float8 needs a GPU, and this run is on the CPU; set training.float8 = 'none'")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"training.float8 needs a GPU with float8 matrix products (Ada, Hopper, MI300 or newer), and {name} has "
            "none; set training.float8 = 'none'"
        )


class Float8Matmuls(Matmuls):
    """The three products of a linear layer, each with both operands rounded to float8."""

    def __init__(self, config: Float8LinearConfig) -> None:
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        self.config = config
        products = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        self.products = LinearMMConfig(
            *(ScaledMMConfig(config.emulate, one.use_fast_accum, False, config.pad_inner_dim) for one in products)
        )

    def output(self, x: Tensor, weight: Tensor) -> Tensor:
        c = self.config
        left = self._rounded(x.flatten(0, -2), c.cast_config_input, "INPUT", -1)
        right = self._rounded(weight.T, c.cast_config_weight, "WEIGHT", 0)
        out: Tensor = torch.mm(left, right).unflatten(0, x.shape[:-1])
        return out

    def input_gradient(self, grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        c = self.config
        left = self._rounded(grad.flatten(0, -2), c.cast_config_grad_output, "GRAD_OUTPUT", -1)
        right = self._rounded(weight.T, c.cast_config_weight_for_grad_input, "WEIGHT", -1)
        gradient: Tensor = torch.mm(left, right.t()).unflatten(0, grad.shape[:-1])
        return gradient if total is None else total.add_(gradient)

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        c = self.config
        left = self._rounded(grad.flatten(0, -2), c.cast_config_grad_output_for_grad_weight, "GRAD_OUTPUT", 0)
        right = self._rounded(x.flatten(0, -2), c.cast_config_input_for_grad_weight, "INPUT", 0)
        return torch.mm(left.t(), right)

    def _rounded(self, t: Tensor, cast: CastConfig, role: str, scaled_along: int) -> Tensor:
        """``scaled_along``: the dim that shares one scale, where scales are by row."""
        from torchao.float8.config import ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        if cast.scaling_type is ScalingType.DISABLED:
            return t
        rounded: Tensor = hp_tensor_to_float8_dynamic(
            t,
            cast.target_dtype,
            self.products,
            gemm_input_role=GemmInputRole[role],
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(scaled_along, cast.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return rounded
