"""Run the matmuls of the blocks' linear layers in 8-bit floats with torchao (arXiv 2209.05433).

Weights, gradients, and activations stay in bf16. Just before each matmul, both operands are scaled and rounded to
float8. The scale comes from the largest absolute value, either of the whole tile or of each row. Each rank scales its
own tiles, so the ranks need not exchange these values.
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
"""Lowest compute capability of an NVIDIA GPU with float8 matmuls (8.9 is Ada)."""


def use_float8(model: Transformer, recipe: str) -> None:
    """Make the linear layers of the blocks multiply in float8. The head, embeddings, and norms do not change.

    Args:
        recipe: the name of a torchao recipe. ``"tensorwise"`` is the fastest. ``"rowwise"`` is closer to the results
            with bf16. ``"rowwise_with_gw_hp"`` is the closest, because it computes weight gradients in bf16.

    Raises:
        UserError: torchao is not installed.
    """
    import_extra("torchao.float8", "float8", f"training.float8 = '{recipe}' needs")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    matmuls = Float8Matmuls(config)
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, Linear4D):
                module.matmuls = matmuls
        # With x = y = 1, some layers are still nn.Linear, and torchao converts these.
        convert_to_float8_training(block, config=config)


def require_float8(device: torch.device) -> None:
    """Check that the device supports float8 matmuls. AMD GPUs are not checked.

    Raises:
        UserError: The device is a CPU, or an NVIDIA GPU without float8 matmuls.
    """
    if device.type == "cpu":
        raise UserError("training.float8 needs a GPU, but this run is on the CPU; set training.float8 = 'none'")
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UserError(
            f"training.float8 needs a GPU with float8 matmuls (Ada, Hopper, MI300 or newer), but {name} does not "
            "support float8; set training.float8 = 'none'"
        )


class Float8Matmuls(Matmuls):
    """The three matmuls of a linear layer, each with both operands rounded to float8."""

    def __init__(self, config: Float8LinearConfig) -> None:
        from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

        self.config = config
        gemms = (config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight)
        self.gemms = LinearMMConfig(
            *(ScaledMMConfig(config.emulate, gemm.use_fast_accum, False, config.pad_inner_dim) for gemm in gemms)
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
        """Round ``t`` to float8, or return it unchanged if the recipe does not round this operand.

        If the recipe uses one scale per row, all entries along the dim ``scaled_along`` have the same scale.
        """
        from torchao.float8.config import ScalingType
        from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        if cast.scaling_type is ScalingType.DISABLED:
            return t
        rounded: Tensor = hp_tensor_to_float8_dynamic(
            t,
            cast.target_dtype,
            self.gemms,
            gemm_input_role=GemmInputRole[role],
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=get_maybe_axiswise_dim(scaled_along, cast.scaling_granularity),
            round_scales_to_power_of_2=self.config.round_scales_to_power_of_2,
        )
        return rounded
