"""The LM head and its cross-entropy. The tensor axis x splits the vocabulary. In the loss, the tensor axis y splits the
tokens.

The forward pass computes the loss and its gradients together, for a chunk of tokens at a time. So only the logits of
one chunk are in memory (as in Hsu et al. 2024, arXiv 2410.10989).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.layout import CHUNK_LOGITS
from fourfold.config.model import IGNORE_INDEX
from fourfold.models.autograd import Context, Function, not_compiled
from fourfold.models.softcap import softcapped
from fourfold.models.transformer import LMHead
from fourfold.parallel.grid.communicate import all_gather, all_reduce, reduce_scatter
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.fused_loss import differentiate_logits, fuses_loss, normalize_logits
from fourfold.parallel.tensor.sharding import Tile, Tiled


class ParallelHead(Tiled):
    """The LM head, with weight [vocab/x, hidden/y]. The embedding's weight is split in the same way, so the two can be
    tied."""

    weight: nn.Parameter

    def __init__(self, head: LMHead, grid: Grid) -> None:
        super().__init__()
        self.vocab_size, self.softcap, self.x, self.y = head.vocab_size, head.softcap, grid.x, grid.y
        self.chunk_logits = CHUNK_LOGITS[grid.device_type]
        self.is_fused = fuses_loss(grid.device_type)
        """Whether the loss runs as Triton kernels, in the dtype of the logits. Otherwise the logits are converted to
        float32."""
        self.add_tile("weight", head.weight, Tile(x=0, y=1), grid)

    def forward(self, x_BTh: Tensor, labels_BS: Tensor | None = None, loss_scale: Tensor | float = 1.0) -> Tensor:
        """Run the head.

        Args:
            loss_scale: the factor that the caller multiplies the loss by before the backward pass. This forward pass
                already computes the gradients, so it needs the factor. Without it, the logits' gradients could
                underflow in fp16.

        Returns:
            The sum of the token losses if there are labels. It is the same on all ranks of x and y. Without labels, the
            logits [B, S, V], where V is the vocabulary size without padding.
        """
        if labels_BS is None:
            return self._logits(x_BTh)
        return _loss(x_BTh, where_differentiated(self.weight), labels_BS, self, loss_scale)

    def real_columns(self) -> int:
        """Return how many rows of this rank's weight tile are not padding."""
        rows = self.weight.shape[0]
        return min(max(self.vocab_size - self.x.rank * rows, 0), rows)

    def logits_of_chunk(self, x_nh: Tensor, weight: Tensor) -> Tensor:
        """Return this rank's share of the logits of n tokens, [m, v] with m = n/y and v = V/x. V is the vocabulary size
        with padding."""
        logits_mv = reduce_scatter(x_nh @ weight.T, self.y, 0, "lm_head: logits")
        return logits_mv if self.is_fused else logits_mv.float()

    def _logits(self, x_BTh: Tensor) -> Tensor:
        x_BSh = all_gather(x_BTh, self.x, 1, "lm_head: tokens")
        logits_BSv = all_reduce(F.linear(x_BSh, self.weight), self.y, "lm_head: logits")
        logits_BSV = all_gather(logits_BSv, self.x, 2, "lm_head: logits")[..., : self.vocab_size]
        return softcapped(logits_BSV, self.softcap)


def where_differentiated(weight: Tensor) -> Tensor:
    """Return the weight. If gradients are disabled, detach the weight, so that the head does not compute a gradient for
    it.

    This is necessary because ``needs_input_grad`` of an autograd function is True for a parameter even under
    ``torch.no_grad``.
    """
    return weight if torch.is_grad_enabled() else weight.detach()


class _Loss(Function):
    @staticmethod
    def forward(
        ctx: Context[Tensor | float],
        x_BTh: Tensor,
        weight: Tensor,
        labels_BS: Tensor,
        head: ParallelHead,
        loss_scale: Tensor | float,
    ) -> Tensor:
        x_BSh = all_gather(x_BTh, head.x, 1, "lm_head: tokens")
        loss, dx, dw = loss_and_gradients(x_BSh, weight, labels_BS, head, loss_scale, ctx.needs_input_grad[:2])
        ctx.save_for_backward(dx, dw)
        ctx.kept = loss_scale
        return all_reduce(loss, head.y, "lm_head: loss")

    @staticmethod
    def backward(ctx: Context[Tensor | float], scale: Tensor) -> tuple[Tensor | None, ...]:
        return *saved_gradients(ctx, scale), None, None, None


_loss = not_compiled(_Loss.apply)


def saved_gradients(ctx: Context[Tensor | float], scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the input and of the weight, which the forward pass has saved. A gradient that it did not
    compute is None.

    Args:
        ctx: the context of the forward pass. Its saved gradients are already multiplied by the loss scale ``ctx.kept``.
        scale: the gradient of the loss.
    """
    dx, dw = ctx.saved_tensors
    scale = scale / ctx.kept
    return None if dx is None else dx * scale, None if dw is None else dw * scale


def loss_and_gradients(
    x_BSh: Tensor,
    weight: Tensor,
    labels_BS: Tensor,
    head: ParallelHead,
    loss_scale: Tensor | float,
    wanted: Sequence[bool],
    weights_BS: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the losses of this y rank's tokens, and the gradients.

    Args:
        x_BSh: the hidden states of the tokens of all x ranks.
        wanted: two flags: whether to compute the gradient of the input, and the gradient of the weight.
        weights_BS: a factor for each token's gradient. The sum of the losses does not include it.

    Returns:
        Three values: the sum of the losses of this y rank's tokens, the gradient of this x rank's input [B, T, h], and
        the gradient of the weight tile. A gradient that is not wanted is None.
    """
    x_Nh, labels_N = x_BSh.flatten(0, 1), labels_BS.flatten()
    wants_dx, wants_dw = wanted
    dx_Nh = torch.empty_like(x_Nh) if wants_dx else None
    dw_vh = torch.zeros_like(weight, dtype=torch.float32) if wants_dw else None
    loss = torch.zeros((), dtype=torch.float32, device=x_Nh.device)
    size = chunk_size(x_Nh.shape[0], weight.shape[0], head.y.size, head.chunk_logits)
    for begin in range(0, x_Nh.shape[0], size):
        chunk = slice(begin, min(begin + size, x_Nh.shape[0]))
        logits_mv = head.logits_of_chunk(x_Nh[chunk], weight)
        my_labels_m = labels_N[chunk].chunk(head.y.size)[head.y.rank]
        factors: Tensor | float = loss_scale
        if weights_BS is not None:
            factors = weights_BS.flatten()[chunk].chunk(head.y.size)[head.y.rank] * loss_scale
        chunk_loss, dlogits_mv = cross_entropy(logits_mv, my_labels_m, head, factors if any(wanted) else None)
        loss += chunk_loss
        if dlogits_mv is None:
            continue
        dlogits_nv = all_gather(dlogits_mv.to(weight.dtype), head.y, 0, "lm_head: logits' gradient")
        if dx_Nh is not None:
            torch.mm(dlogits_nv, weight, out=dx_Nh[chunk])
        if dw_vh is not None:
            _add_matmul(dw_vh, dlogits_nv.T, x_Nh[chunk])
    if dx_Nh is not None:
        dx_Nh = reduce_scatter(dx_Nh.view_as(x_BSh), head.x, 1, "lm_head: input gradient")
    return loss, dx_Nh, None if dw_vh is None else dw_vh.to(weight.dtype)


def chunk_size(tokens: int, columns: int, y: int, budget: int) -> int:
    """Return the number of tokens in a chunk.

    Args:
        tokens: total number of tokens.
        columns: number of logits per token on this rank.
        y: size of the axis y. The number of tokens in a chunk is a multiple of y.
        budget: the largest number of logits that this rank computes for a chunk. A chunk has at least y tokens, even if
            its logits exceed the budget.
    """
    return min(tokens, max(1, budget // columns // y) * y)


def cross_entropy(
    logits_mv: Tensor,
    labels_m: Tensor,
    head: ParallelHead,
    factors: Tensor | float | None,
    total: Callable[[Tensor], Tensor] = torch.sum,
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses of m tokens whose logits are split over x. This overwrites the logits.

    Args:
        factors: a factor for the gradients, either a scalar or one factor per token [m]. None computes no gradient.
        total: the function that reduces the losses [m]. By default it sums them.

    Returns:
        The reduced losses, and the gradient of the logits [m, v] or None. For every ``total``, this is the gradient of
        the sum of the losses.
    """
    real, rows = head.real_columns(), logits_mv.shape[1]
    first = head.x.rank * rows
    if head.is_fused:
        normalizer_m, target_m = normalize_logits(logits_mv, labels_m, first, real, head.softcap)
    else:
        slopes_mv = None
        if head.softcap:
            logits_mv.div_(head.softcap).tanh_()
            slopes_mv = logits_mv.square().neg_().add_(1) if factors is not None else None
            logits_mv.mul_(head.softcap)
        if real < rows:
            logits_mv[:, real:] = -torch.inf
        columns_m = labels_m - first
        mine_m = (columns_m >= 0) & (columns_m < rows)
        columns_m1 = columns_m.masked_fill(~mine_m, 0)[:, None]
        target_m = logits_mv.gather(1, columns_m1)[:, 0].masked_fill(~mine_m, 0)
        # On a rank that holds only padding, all logits are −inf. Clamp their maximum, because −inf minus −inf is NaN.
        largest_m = logits_mv.amax(1).clamp(min=torch.finfo(torch.float32).min)
        exp_mv = logits_mv.sub_(largest_m[:, None]).exp_()
        normalizer_m = largest_m + exp_mv.sum(1).log()
    if head.x.size > 1:
        both_x2m = all_gather(torch.stack([normalizer_m, target_m])[None], head.x, 0, "lm_head: normalizers")
        normalizer_m, target_m = both_x2m[:, 0].logsumexp(0), both_x2m[:, 1].sum(0)
    kept_m = labels_m != IGNORE_INDEX
    loss = total((normalizer_m - target_m) * kept_m)
    if factors is None:
        return loss, None
    if head.is_fused:
        differentiate_logits(logits_mv, labels_m, normalizer_m, kept_m * factors, first, real, head.softcap)
        return loss, logits_mv
    gradient_mv = exp_mv.mul_(((largest_m - normalizer_m).exp() * kept_m * factors)[:, None])
    gradient_mv.scatter_add_(1, columns_m1, -((mine_m & kept_m) * factors).to(gradient_mv.dtype)[:, None])
    return loss, gradient_mv if slopes_mv is None else gradient_mv.mul_(slopes_mv)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to ``total``, which is float32. The operands may be bf16."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and torch.version.hip is None:
        # With out_dtype, torch does not round the product to bf16 before the addition.
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
