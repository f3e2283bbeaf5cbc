"""RMSNorm and LayerNorm for tokens whose channels are split over ranks. The ranks exchange small sums per token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.autograd import Context, Function, not_compiled
from fourfold.models.norms import RMSNorm, rms_norm
from fourfold.models.recomputation import recomputable
from fourfold.parallel.grid.communicate import all_reduce
from fourfold.parallel.grid.grid import Axis, Grid
from fourfold.parallel.tensor.sharding import Tile, Tiled


class Norm(Tiled):
    """Normalizes tokens [B, T, H/y] over all H channels.

    Args:
        axis: the axis that splits the channels, by default y.
        tile: the tile of the weights. The default is for norms of the residual stream: x splits the tokens, so the
            gradients must be summed over x.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, norm: RMSNorm | nn.LayerNorm, grid: Grid, name: str, axis: Axis | None = None, tile: Tile | None = None
    ) -> None:
        super().__init__()
        tile = tile or Tile(y=0, partial_over=("x",))
        self.subtracts_mean = isinstance(norm, nn.LayerNorm)
        self.zero_centered = isinstance(norm, RMSNorm) and norm.zero_centered
        self.rounds_last = isinstance(norm, RMSNorm) and norm.rounds_last
        self.eps, self.size, self.axis, self.name = norm.eps, norm.weight.shape[0], axis or grid.y, name
        self.whole = self.axis.size == 1 and not self.zero_centered
        self.add_tile("weight", norm.weight, tile, grid)
        self.add_tile("bias", norm.bias if isinstance(norm, nn.LayerNorm) else None, tile, grid)

    @recomputable
    def forward(self, x_BTh: Tensor) -> Tensor:
        if self.whole and x_BTh.is_cuda:
            return self.fused(x_BTh)
        return _normalize(x_BTh, self, self.weight, self.bias)

    def fused(self, x_BTH: Tensor) -> Tensor:
        """Run PyTorch's norm, which is one kernel on a GPU. This rank must have all channels."""
        if self.subtracts_mean:
            return F.layer_norm(x_BTH, (self.size,), self.weight, self.bias, self.eps)
        return F.rms_norm(x_BTH, (self.size,), self.weight, self.eps)


class _Normalize(Function):
    """Computes x̂ = (x − mean)/σ and then x̂·w + b, with weight w and bias b. An RMSNorm has mean 0 and no bias.

    By default, x̂ is computed in float32 and rounded to the dtype of x before it is multiplied by w. With
    ``rounds_last``, x̂·w is computed in float32. With ``zero_centered``, x̂·(1 + w) is computed in float32.
    """

    @staticmethod
    def forward(ctx: Context[Norm], x_BTh: Tensor, layer: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
        if layer.subtracts_mean:
            mean, rstd = _moments(x_BTh.float(), layer)
        else:
            square = torch.linalg.vector_norm(x_BTh, dim=-1, keepdim=True, dtype=torch.float32).square()
            square = all_reduce(square, layer.axis, f"{layer.name}: statistics")
            mean, rstd = None, (square / layer.size + layer.eps).rsqrt()
        ctx.save_for_backward(x_BTh, mean, rstd, weight)
        ctx.kept = layer
        out = torch.empty_like(x_BTh)
        if layer.zero_centered:
            return torch.mul(_standardize(x_BTh, mean, rstd), 1 + weight.float(), out=out)
        if layer.rounds_last:
            return torch.mul(_standardize(x_BTh, mean, rstd), weight.float(), out=out)
        # Write to ``out``, so that the same operation also rounds to the dtype of x. Rounding separately would read and
        # write all values once more.
        _standardize(x_BTh, mean, rstd, out).mul_(weight)
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Context[Norm], grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor | None]:
        x_BTh, mean, rstd, weight = ctx.saved_tensors
        layer = ctx.kept
        standard = _standardize(x_BTh, mean, rstd)
        dtype, weight = weight.dtype, weight.float() + (1 if layer.zero_centered else 0)
        scaled = grad * standard
        shares = [scaled @ weight]
        if layer.subtracts_mean:
            shares.append(grad.float() @ weight)
        sums = all_reduce(torch.stack(shares), layer.axis, f"{layer.name}: statistics' gradient") / layer.size
        d_weight = scaled.sum((0, 1)).to(dtype)
        d_bias = grad.sum((0, 1), dtype=torch.float32).to(dtype) if ctx.needs_input_grad[3] else None
        dx = standard.mul_(-sums[0][..., None]).addcmul_(grad, weight)
        if layer.subtracts_mean:
            dx -= sums[1][..., None]
        return torch.mul(dx, rstd, out=torch.empty_like(x_BTh)), None, d_weight, d_bias


_normalize = not_compiled(_Normalize.apply)


def _moments(x: Tensor, layer: Norm) -> tuple[Tensor, Tensor]:
    """Return the mean and 1/σ of each token over the channels of all ranks, with one all-reduce.

    Mean and variance of this rank's channels are computed in float32. The sums over ranks, Σx and Σx², are in float64,
    so that the difference E[x²] − E[x]² does not lose precision.
    """
    channels = x.shape[-1]
    variance, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
    variance, mean = variance.double(), mean.double()
    sums = torch.stack([mean * channels, (variance + mean.square()) * channels])
    mean, square = all_reduce(sums, layer.axis, f"{layer.name}: statistics") / layer.size
    rstd = (square - mean.square() + layer.eps).rsqrt()
    return mean.float(), rstd.float()


def _standardize(x: Tensor, mean: Tensor | None, rstd: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.mul(x if mean is None else x - mean, rstd, out=out)


class HeadNorm(Tiled):
    """An RMSNorm of each query or key head.

    A rank has all channels of its heads, so the norm needs no collective. Each rank computes the weight's gradient only
    from its own heads and tokens, so the gradient must be summed over x and y.
    """

    weight: nn.Parameter

    def __init__(self, norm: RMSNorm, grid: Grid) -> None:
        super().__init__()
        self.eps, self.zero_centered, self.rounds_last = norm.eps, norm.zero_centered, norm.rounds_last
        self.add_tile("weight", norm.weight, Tile(partial_over=("x", "y")), grid)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.zero_centered, self.rounds_last)
