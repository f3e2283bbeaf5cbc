"""The LM head for preference optimization (DPO). It computes log-probabilities of whole answers, and the DPO loss of
pairs of answers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.models.autograd import Context, Function, not_compiled
from fourfold.models.transformer import LMHead
from fourfold.parallel.grid.communicate import all_gather, all_reduce
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.head import (
    ParallelHead,
    chunk_size,
    cross_entropy,
    loss_and_gradients,
    saved_gradients,
    where_differentiated,
)


class PreferenceHead(ParallelHead):
    """The LM head with the DPO loss (eq. 7 of Rafailov et al. 2023, arXiv 2305.18290).

    The sequences of a micro-batch come in pairs: the chosen answer to a prompt, then the rejected answer. Let π be the
    model's log-probability of an answer, summed over its labels. Let r be the reference model's log-probability of the
    same answer. The reward of an answer is β · (π − r). The margin m of a pair is the chosen answer's reward minus the
    rejected answer's reward. The loss of the pair is −log σ(m).

    The derivative of the loss is −β · σ(−m) with respect to the chosen answer's π, and β · σ(−m) with respect to the
    rejected answer's π. So a token's gradient is the gradient of its cross-entropy, times a factor that is the same for
    the whole sequence. This factor is known only after the log-probabilities of the whole sequence are summed. So the
    logits are computed twice: once for the factor, and once for the gradient.
    """

    def __init__(self, head: LMHead, grid: Grid, beta: float) -> None:
        super().__init__(head, grid)
        self.cp, self.beta = grid.cp, beta
        self.figures: Tensor | None = None
        """Sums over all pairs since the trainer last reset the sums, [4] in float64:

        the number of pairs, the margins, the number of positive margins, and the rewards of the chosen answers.
        """

    def forward(
        self,
        x_BTh: Tensor,
        labels_BS: Tensor | None = None,
        loss_scale: Tensor | float = 1.0,
        reference_B: Tensor | None = None,
    ) -> Tensor:
        """Run the head.

        Args:
            reference_B: the reference model's log-probability of each sequence's answer.

        Returns:
            With labels and references, the sum of the pairs' losses. It is divided by the size of the context axis cp,
            because the caller sums over cp. With labels only, the log-probabilities [B] of the answers. Without labels,
            the logits [B, S, V].
        """
        if labels_BS is None:
            return self._logits(x_BTh)
        if reference_B is None:
            with torch.no_grad():
                x_BSh = all_gather(x_BTh, self.x, 1, "lm_head: tokens")
                return self.log_probabilities(x_BSh, self.weight, labels_BS)
        weight = where_differentiated(self.weight)
        return _preference_loss(x_BTh, weight, labels_BS, self, loss_scale, reference_B)

    def log_probabilities(self, x_BSh: Tensor, weight: Tensor, labels_BS: Tensor) -> Tensor:
        """Return the log-probability of each sequence's answer, [B], summed over the sequence's labels on all ranks."""
        x_Nh, labels_N = x_BSh.flatten(0, 1), labels_BS.flatten()
        rows_N = torch.arange(len(labels_BS), device=x_BSh.device).repeat_interleave(labels_BS.shape[1])
        found_B = torch.zeros(len(labels_BS), dtype=torch.float32, device=x_BSh.device)
        size = chunk_size(x_Nh.shape[0], weight.shape[0], self.y.size, self.chunk_logits)
        for begin in range(0, x_Nh.shape[0], size):
            chunk = slice(begin, min(begin + size, x_Nh.shape[0]))
            logits_mv = self.logits_of_chunk(x_Nh[chunk], weight)
            labels_m, rows_m = (t[chunk].chunk(self.y.size)[self.y.rank] for t in (labels_N, rows_N))
            losses_m, _ = cross_entropy(logits_mv, labels_m, self, None, total=lambda losses: losses)
            found_B.index_add_(0, rows_m, losses_m, alpha=-1)
        for axis in (self.y, self.cp):
            found_B = all_reduce(found_B, axis, "lm_head: log-probabilities of answers")
        return found_B

    def note(self, margins_P: Tensor, rewards_P: Tensor) -> None:
        """Add the margins and the chosen answers' rewards of a micro-batch to ``figures``."""
        seen = margins_P.new_full((), len(margins_P))
        sums = torch.stack([seen, margins_P.sum(), (margins_P > 0).sum().to(seen), rewards_P.sum()]).double()
        self.figures = sums if self.figures is None else self.figures + sums


class _PreferenceLoss(Function):
    @staticmethod
    def forward(
        ctx: Context[Tensor | float],
        x_BTh: Tensor,
        weight: Tensor,
        labels_BS: Tensor,
        head: PreferenceHead,
        loss_scale: Tensor | float,
        reference_B: Tensor,
    ) -> Tensor:
        x_BSh = all_gather(x_BTh, head.x, 1, "lm_head: tokens")
        rewards_B = head.beta * (head.log_probabilities(x_BSh, weight, labels_BS) - reference_B)
        chosen_P, rejected_P = rewards_B.unflatten(0, (-1, 2)).unbind(1)
        margins_P = chosen_P - rejected_P
        head.note(margins_P, chosen_P)
        wanted = ctx.needs_input_grad[:2]
        dx = dw = None
        if any(wanted):
            factors_P = head.beta * torch.sigmoid(-margins_P)
            factors_BS = torch.stack([factors_P, -factors_P], 1).view(-1, 1).expand_as(labels_BS)
            _, dx, dw = loss_and_gradients(x_BSh, weight, labels_BS, head, loss_scale, wanted, factors_BS)
        ctx.save_for_backward(dx, dw)
        ctx.kept = loss_scale
        return -F.logsigmoid(margins_P).sum() / head.cp.size

    @staticmethod
    def backward(ctx: Context[Tensor | float], scale: Tensor) -> tuple[Tensor | None, ...]:
        return *saved_gradients(ctx, scale), None, None, None, None


_preference_loss = not_compiled(_PreferenceLoss.apply)
