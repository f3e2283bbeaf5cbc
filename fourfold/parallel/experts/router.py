"""The router of an MoE layer on the grid. The tensor axis x splits the tokens, and y splits the channels of a token."""

import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.models.mixture import BIAS, BiasInFloat32, Router, Routing, count_rows, within_capacity
from fourfold.models.recomputation import RECOMPUTES, remembered
from fourfold.parallel.attention.context import in_order, take_chunks
from fourfold.parallel.experts.expert_load import CountedRouter
from fourfold.parallel.grid.communicate import all_gather, sum_of
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.sharding import Tile


class ParallelRouter(BiasInFloat32, CountedRouter):
    """The router, with weight [E, H/y] for E experts and the hidden size H.

    All ranks of y compute the same logits, so they choose the same experts.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, router: Router, grid: Grid, layer: int) -> None:
        super().__init__()
        self.choice, self.num_experts = router.choice, router.num_experts
        self.y, self.layer = grid.y, layer
        self.add_tile("weight", router.weight, Tile(y=1, partial_over=("x",)), grid)
        self.add_tile("bias", router.bias, Tile(partial_over=("x",)), grid)
        self.add_tile(BIAS, router.e_score_correction_bias, Tile(sharded=False), grid)

    def forward(self, x_Th: Tensor, is_data_T: Tensor | None = None) -> Routing:
        """Choose the experts of each token.

        Args:
            x_Th: This rank's tokens.
            is_data_T: False for padding. Padding gets the expert index ``num_experts``, so no expert processes it.
                Padding does not count as load.
        """
        logits_TE = sum_of(F.linear(x_Th.float(), self.weight.float()), self.y, "router: logits")
        if self.bias is not None:
            logits_TE = logits_TE + self.bias.float()
        if self.load is not None:
            logits_TE = self.load.with_losses(logits_TE, self.layer, is_data_T)
        scores_TE = self.choice.scores(logits_TE)
        # In a recomputation, reuse the experts that the first pass has chosen. A new choice could differ because of
        # rounding errors.
        chosen_TK = remembered(self, lambda: self.choice.experts(scores_TE, self.e_score_correction_bias))
        experts_TK = chosen_TK
        if is_data_T is not None:
            experts_TK = chosen_TK.masked_fill(~is_data_T[:, None], self.num_experts)
        if self.load is not None and not RECOMPUTES.get():
            self.load.count(self.layer, logits_TE.detach(), count_rows(experts_TK, self.num_experts), is_data_T)
        return Routing(logits_TE, experts_TK, self.choice.weights(scores_TE, chosen_TK))

    def count_dropped(self, kept_TK: Tensor) -> None:
        """Count the dropped rows, which are the entries of ``kept_TK`` that are False."""
        if self.load is not None and not RECOMPUTES.get():
            self.load.count_dropped(self.layer, (~kept_TK).sum())


def within_capacity_of_sequences(experts_BTK: Tensor, num_experts: int, factor: float, grid: Grid) -> Tensor:
    """Return a mask of this rank's rows, [B, T, K]: True if the row's expert has room for the row.

    A row is one token for one of its K chosen experts.

    The capacity applies to whole sequences (``within_capacity``), but the axes cp and x split the tokens of a sequence.
    So first gather the chosen experts of all tokens of each sequence.
    """
    if grid.x.size * grid.cp.size == 1:
        return within_capacity(experts_BTK, num_experts, factor)
    whole_BSK = all_gather(experts_BTK.int(), grid.x, 1, "router: chosen experts")
    if grid.cp.size > 1:
        parts_nBSK = all_gather(whole_BSK[None], grid.cp, 0, "router: chosen experts")
        whole_BSK = in_order(parts_nBSK, grid.cp.size)
    kept_BSK = within_capacity(whole_BSK, num_experts, factor)
    return take_chunks(kept_BSK, grid.cp.rank, grid.cp.size).chunk(grid.x.size, dim=1)[grid.x.rank]
