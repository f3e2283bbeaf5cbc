"""A mixture-of-experts (MoE) layer, which replaces an MLP. A router sends each token to a few of many small MLPs.

The layers of Mixtral (Jiang et al. 2024, arXiv 2401.04088), Qwen-MoE, OLMoE (arXiv 2409.02060), and DeepSeek-V3 (arXiv
2412.19437) differ only in a few settings.

Each token is sent to K experts, so it becomes K *rows*: one per chosen expert. Shapes: T tokens, E experts, K experts
per token, N = T·K rows, H hidden size, F inner width of an expert.
"""

from collections.abc import Callable
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.models.autograd import differentiable
from fourfold.models.grouped import Groups, add_biases, grouped_matmul
from fourfold.models.mlp import MLP, Activation
from fourfold.models.recomputation import recomputable


class Mixture(nn.Module):
    """Computes Σ_k w_tk · expert_tk(x_t), plus the output of the shared expert if there is one."""

    capacity_factor = 0.0
    """In training, an expert processes at most capacity_factor · R / E rows (rounded up) of a sequence that has R rows.
    0 means no limit."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        shared = config.shared_expert_intermediate_size
        self.shared_expert = MLP(config, shared) if shared else None
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_expert_gate else None

    def forward(self, x_BSH: Tensor, is_data_BS: Tensor | None = None) -> Tensor:
        """Run the layer. ``is_data_BS`` is False for padding, which experts do not process."""
        x_TH, experts = x_BSH.flatten(0, 1), self.gate.num_experts
        routing, kept_TK = self.gate(x_TH), None
        experts_BSK = routing.experts_TK.unflatten(0, x_BSH.shape[:2])
        if is_data_BS is not None:
            experts_BSK = experts_BSK.masked_fill(~is_data_BS[..., None], experts)
        if self.capacity_factor and self.training:
            kept_TK = within_capacity(experts_BSK, experts, self.capacity_factor).flatten(0, 1)
        order = order_by_expert(experts_BSK.flatten(0, 1), kept_TK, experts, is_data_BS is not None)
        groups = Groups(order.sizes_E)
        rows_NH = take_rows(x_TH, order, order.taken(groups))
        # Do not assign the experts' outputs to a variable, because the variable would keep them in memory.
        out_BSH = combine(self.experts(rows_NH, groups), order, routing.weights_TK).view_as(x_BSH)
        return out_BSH if self.shared_expert is None else out_BSH + self.shared(x_BSH)

    def shared(self, x_BSH: Tensor) -> Tensor:
        """Return the output of the shared expert, multiplied by its gate if it has one."""
        assert self.shared_expert is not None
        out_BSH: Tensor = self.shared_expert(x_BSH)
        return out_BSH if self.shared_expert_gate is None else out_BSH * self.shared_expert_gate(x_BSH).sigmoid()


class Routing(NamedTuple):
    """The experts chosen for each token, and the weights of their outputs."""

    logits_TE: Tensor
    """The router's outputs, in float32."""
    experts_TK: Tensor
    """Indices of the chosen experts, best first. Parallel layers give padding the index ``num_experts``."""
    weights_TK: Tensor
    """The factors that the outputs of the chosen experts are multiplied by, in float32."""


BIAS = "e_score_correction_bias"


class BiasInFloat32(nn.Module):
    """A base class for routers. When the model is converted to a 16-bit dtype, ``e_score_correction_bias`` stays in
    float32.

    The router adds this bias to the scores before it chooses experts. Training changes the bias in steps that are too
    small for bf16.
    """

    e_score_correction_bias: nn.Parameter | None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's _apply has no annotations
        bias = self.e_score_correction_bias
        if bias is not None and bias.dtype in (torch.bfloat16, torch.float16):
            self.register_parameter(BIAS, nn.Parameter(bias.detach().float(), requires_grad=False))
        return self


class Router(BiasInFloat32):
    """Chooses the experts of each token, and computes the experts' weights, in float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.choice = Choice(config)
        self.num_experts = config.num_experts
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.num_experts)) if config.mlp_bias else None
        bias = nn.Parameter(torch.empty(config.num_experts, dtype=torch.float32), requires_grad=False)
        self.register_parameter(BIAS, bias if config.router_bias else None)

    def forward(self, x_TH: Tensor) -> Routing:
        bias_E = None if self.bias is None else self.bias.float()
        logits_TE = F.linear(x_TH.float(), self.weight.float(), bias_E)
        scores_TE = self.choice.scores(logits_TE)
        experts_TK = self.choice.experts(scores_TE, self.e_score_correction_bias)
        return Routing(logits_TE, experts_TK, self.choice.weights(scores_TE, experts_TK))


def is_router_bias(name: str) -> bool:
    """Return whether a parameter is an ``e_score_correction_bias``. Training updates this bias without a gradient."""
    return name.endswith(BIAS)


class Choice:
    """Chooses experts from the router's logits, and computes the experts' weights."""

    def __init__(self, config: ModelConfig) -> None:
        self.chosen, self.sigmoid = config.num_experts_per_tok, config.router_score == "sigmoid"
        self.normalize, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.groups, self.chosen_groups = config.n_group, config.topk_group

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Return the experts' scores. Softmax scores sum to one, but sigmoid scores do not."""
        return logits_TE.sigmoid() if self.sigmoid else logits_TE.softmax(-1)

    def experts(self, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
        """Return the indices of the experts with the largest scores, [T, K].

        The bias affects this choice, but not the weights (arXiv 2408.15664, eq. 3). If the model divides experts into
        groups, only experts of the best groups can be chosen (arXiv 2412.19437, section 2.1.2).
        """
        choosing_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
        if self.groups > 1:
            by_group_TGe = choosing_TE.unflatten(-1, (self.groups, -1))
            # DeepSeek-V3 adds the scores of a group's two best experts. DeepSeek-V2 takes the best score.
            group_scores_TG = by_group_TGe.topk(2 if self.sigmoid else 1, dim=-1).values.sum(-1)
            best_TG = group_scores_TG.topk(self.chosen_groups, dim=-1).indices
            is_left_out_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(-1, best_TG, False)
            choosing_TE = by_group_TGe.masked_fill(is_left_out_TG[..., None], -torch.inf).flatten(1)
        return choosing_TE.topk(self.chosen, dim=-1).indices

    def weights(self, scores_TE: Tensor, experts_TK: Tensor) -> Tensor:
        """Return the factors by which the chosen experts' outputs are multiplied, [T, K]."""
        weights_TK = scores_TE.gather(1, experts_TK)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK * self.factor


class Experts(nn.Module):
    """The experts: gated MLPs of one shape, with their weights stacked. Input and output rows are sorted by expert."""

    gate_proj_bias: nn.Parameter | None
    up_proj_bias: nn.Parameter | None
    down_proj_bias: nn.Parameter | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        widths = {"gate_proj_bias": inner, "up_proj_bias": inner, "down_proj_bias": hidden}
        for name, width in widths.items():
            self.register_parameter(name, nn.Parameter(torch.empty(experts, width)) if config.mlp_bias else None)
        self.activation = Activation(config)

    def forward(self, rows_NH: Tensor, groups: Groups) -> Tensor:
        """Run each expert on its group of rows."""
        gate_NF = add_biases(grouped_matmul(rows_NH, self.gate_proj, groups), self.gate_proj_bias, groups)
        up_NF = add_biases(grouped_matmul(rows_NH, self.up_proj, groups), self.up_proj_bias, groups)
        return self.down(gate_NF, up_NF, groups)

    @recomputable
    def down(self, gate_NF: Tensor, up_NF: Tensor, groups: Groups) -> Tensor:
        """Apply the activation to gate and up, and project the result to the hidden size."""
        out_NH = grouped_matmul(self.activation(gate_NF, up_NF), self.down_proj, groups)
        return add_biases(out_NH, self.down_proj_bias, groups)


class Order(NamedTuple):
    """Describes how to sort rows by expert. Dropped rows (padding, and rows above the capacity) come last."""

    place_N: Tensor
    """The row at each position of the sorted order. The row for the k-th choice of token t has the number t·K + k."""
    inverse_N: Tensor
    """The position of each row in the sorted order."""
    sizes_E: Tensor
    """The number of rows of each expert, not counting dropped rows."""
    chosen: int
    """Number of experts chosen per token (K)."""
    given: Tensor | None
    """The number of rows that were kept, a scalar on the device. None if no row can be dropped."""

    def taken(self, groups: Groups) -> int:
        """Return how many rows to pass to the experts.

        On a GPU, this number includes dropped rows, because the host would have to wait for the exact number.
        """
        return len(self.place_N) if self.given is None or self.place_N.is_cuda else sum(groups.sizes)


def order_by_expert(experts_TK: Tensor, kept_TK: Tensor | None, num_experts: int, is_padded: bool) -> Order:
    """Sort rows by expert, and rows of the same expert by token.

    Args:
        experts_TK: the chosen experts. The index ``num_experts`` marks padding, whose rows are dropped.
        kept_TK: False for rows to drop in addition to padding. None drops only padding.
        is_padded: whether there may be padding.
    """
    keys_TK = experts_TK if kept_TK is None else experts_TK.masked_fill(~kept_TK, num_experts)
    place_N = keys_TK.flatten().argsort(stable=True)
    inverse_N = torch.empty_like(place_N)
    inverse_N[place_N] = torch.arange(len(place_N), device=place_N.device)
    sizes_E = count_rows(keys_TK, num_experts)
    given = sizes_E.sum() if is_padded or kept_TK is not None else None
    return Order(place_N, inverse_N, sizes_E, experts_TK.shape[1], given)


def count_rows(experts_TK: Tensor, num_experts: int) -> Tensor:
    """Return the number of rows that go to each expert, [E]. Do not count rows with the index ``num_experts``, which
    marks padding and dropped rows."""
    ones = torch.ones((), dtype=torch.int64, device=experts_TK.device).expand(experts_TK.numel())
    return ones.new_zeros(num_experts + 1).scatter_add_(0, experts_TK.flatten(), ones)[:num_experts]


def take_rows(x_TH: Tensor, order: Order, count: int) -> Tensor:
    """Return the hidden states that the experts read, [count, H]: one per row, for the first ``count`` sorted rows."""
    first_N, chosen = order.place_N[:count], order.chosen

    def sum_of_tokens(grad_NH: Tensor, inverse_N: Tensor, given: Tensor | None) -> Tensor:
        return _by_token(grad_NH, inverse_N, given, chosen).sum(1)

    return differentiable(x_TH, lambda x: x[first_N // chosen], sum_of_tokens, order.inverse_N, order.given)


def combine(rows_NH: Tensor, order: Order, weights_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's rows, Σ_k w_tk · row_tk, [T, H].

    Args:
        rows_NH: outputs of the experts in the sorted order. Dropped rows count as zero, and may be missing.
    """
    first_N = order.place_N[: len(rows_NH)]
    rows_TKH = differentiable(
        rows_NH,
        lambda rows: _by_token(rows, order.inverse_N, order.given, order.chosen),
        lambda grad_TKH, first_N: grad_TKH.flatten(0, 1)[first_N],
        first_N,
    )
    # Delete the argument, so that the multiplication below can reuse its memory.
    del rows_NH
    return (rows_TKH * weights_TK.to(rows_TKH.dtype)[..., None]).sum(1)


def _by_token(rows_NH: Tensor, inverse_N: Tensor, given: Tensor | None, chosen: int) -> Tensor:
    """Rearrange sorted rows into token order, [T, K, H]. Set the rows after the first ``given`` rows to 0, because they
    were dropped."""
    missing = len(inverse_N) - len(rows_NH)
    if missing:
        rows_NH = F.pad(rows_NH, (0, 0, 0, missing))
    rows_NH = rows_NH[inverse_N]
    # In sorted order, dropped rows come last. No expert writes their outputs, so set them to 0.
    if given is not None and not missing:
        rows_NH.masked_fill_((inverse_N >= given)[:, None], 0)
    rows_TKH: Tensor = rows_NH.unflatten(0, (-1, chosen))
    return rows_TKH


def capacity(factor: float, lengths_B: Tensor, chosen: int, num_experts: int) -> Tensor:
    """Return how many rows of each sequence an expert accepts (GShard, arXiv 2006.16668, section 3.2).

    Args:
        lengths_B: the length of each sequence without padding.
    """
    return (factor * lengths_B.double() * chosen / num_experts).ceil()


def within_capacity(experts_BSK: Tensor, num_experts: int, factor: float) -> Tensor:
    """Return a mask of the rows, [B, S, K]: True if the row's expert accepts the row. In each sequence, an expert
    accepts its first rows, up to the capacity.

    Padding has the expert index ``num_experts``. The returned values for padding have no meaning.
    """
    sequences, _, chosen = experts_BSK.shape
    groups_B1 = (num_experts + 1) * torch.arange(sequences, device=experts_BSK.device)[:, None]
    keys_N = (experts_BSK.flatten(1) + groups_B1).flatten()
    order_N = keys_N.argsort(stable=True)
    sorted_N = keys_N[order_N]
    places_N = torch.arange(len(keys_N), device=keys_N.device)
    before_N = torch.empty_like(keys_N)
    # Count how many earlier rows go to the same expert.
    before_N[order_N] = places_N - torch.searchsorted(sorted_N, sorted_N)
    lengths_B = (experts_BSK[..., 0] < num_experts).sum(1)
    kept_BN = before_N.view(sequences, -1) < capacity(factor, lengths_B, chosen, num_experts)[:, None]
    return kept_BN.view_as(experts_BSK)
