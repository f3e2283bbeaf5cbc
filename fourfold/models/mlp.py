"""The MLP of a decoder's layer in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.models.autograd import Context, Function
from fourfold.models.recomputation import recomputable


class MLP(nn.Module):
    """The MLP, with a gate (SwiGLU, GEGLU) or without a gate (GELU, squared ReLU).

    Args:
        inner: the inner width, by default ``intermediate_size``.
    """

    def __init__(self, config: ModelConfig, inner: int | None = None) -> None:
        super().__init__()
        inner = config.intermediate_size if inner is None else inner
        widths = {"gate_proj": inner, "up_proj": inner} if config.gated_mlp else {"up_proj": inner}
        self.up = Linears(config.hidden_size, config.mlp_bias, **widths)
        self.activation = Activation(config)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down(*self.up(x_BSH))

    @recomputable
    def down(self, *up_BSF: Tensor) -> Tensor:
        """Apply the activation to the outputs of ``up``, and project the result to the hidden size."""
        out_BSH: Tensor = self.down_proj(self.activation(*up_BSF))
        return out_BSH


class Activation(nn.Module):
    """The activation of the MLP. The model's config selects one of these:

    - without a gate: gelu(up) (arXiv 1606.08415) or relu(up)² (arXiv 2109.08668)
    - with a gate: gelu(gate) · up or silu(gate) · up (arXiv 2002.05202)
    - with ``swiglu_limit``: GPT-OSS's clamped SwiGLU (``_ClampedSwiGLU``)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind, self.approximate, self.limit = config.mlp, config.gelu_approximation, config.swiglu_limit

    def forward(self, *gate_and_up_BSF: Tensor) -> Tensor:
        first_BSF, *up_BSF = gate_and_up_BSF
        if self.limit:
            return _ClampedSwiGLU.apply(first_BSF, *up_BSF, self.limit)
        if self.kind == "relu2":
            return _SquaredReLU.apply(first_BSF)
        active_BSF = F.silu(first_BSF) if self.kind == "swiglu" else F.gelu(first_BSF, approximate=self.approximate)
        return active_BSF * up_BSF[0] if up_BSF else active_BSF


class _SquaredReLU(Function):
    """Computes relu(x)². Autograd would need memory for two more tensors in the backward pass."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return F.relu(x).square_()

    @staticmethod
    def setup_context(ctx: Context[None], inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context[None], grad: Tensor) -> Tensor:
        slope: Tensor = ctx.saved_tensors[0].relu()
        return slope.mul_(2).mul_(grad)


SLOPE = 1.702
"""Constant of GPT-OSS's activation gate · sigmoid(SLOPE · gate), which is close to gelu(gate)."""


class _ClampedSwiGLU(Function):
    """Clamps gate and up, and computes (up + 1) · gate · sigmoid(SLOPE · gate).

    Autograd would keep twice as many tensors for the backward pass.
    """

    @staticmethod
    def forward(gate: Tensor, up: Tensor, limit: float) -> Tensor:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(SLOPE * gate))

    @staticmethod
    def setup_context(ctx: Context[float], inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.kept = inputs[2]

    @staticmethod
    def backward(ctx: Context[float], grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (gate, up), limit = ctx.saved_tensors, ctx.kept
        # These operations work in place, so at most three additional tensors exist at a time.
        d_up = gate.clamp(max=limit)
        share = (SLOPE * d_up).sigmoid_()
        d_up.mul_(share)
        d_gate = (1 - share).mul_(d_up).mul_(SLOPE).add_(share)
        del share
        d_gate.mul_(up.clamp(-limit, limit).add_(1)).mul_(grad).mul_(gate <= limit)
        return d_gate, d_up.mul_(grad).mul_(up.abs() <= limit), None


class Linears(nn.ModuleDict):
    """Linear layers that read the same input. The forward pass returns their outputs in order."""

    def __init__(self, in_features: int, bias: bool, **out_features: int) -> None:
        super().__init__({name: nn.Linear(in_features, out, bias=bias) for name, out in out_features.items()})

    def forward(self, x_BSH: Tensor) -> list[Tensor]:
        return [linear(x_BSH) for linear in self.values()]
