"""Count how many rows each expert gets in every step, and use the counts to balance the router. A token that chose K
experts counts as K rows. Padding does not count.

There are two ways to balance the router:

- A balance loss. Each token t adds E · Σ_e f_e P_te to the loss (Fedus et al. 2021, arXiv 2101.03961, eq. 4). E is the
  number of experts. P_te is the router's probability of expert e for this token. f_e is the fraction of all rows that
  went to expert e in the *previous step*, over the whole batch. So the loss is a plain sum over tokens, like the
  cross-entropy. Its gradient needs no collective, and is the same on every grid and for any number of micro-batches.
- A bias per expert (``bias_update_rate``). After each step, the bias goes down if the expert got more rows than the
  mean, and up if it got fewer (arXiv 2408.15664).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fourfold.config.model import ModelConfig
from fourfold.config.run import RunConfig
from fourfold.data.loader import MicroBatch
from fourfold.models.autograd import Context, Function
from fourfold.models.mixture import is_router_bias
from fourfold.parallel.grid.communicate import all_reduce, purpose
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.state import LocalShard
from fourfold.parallel.tensor.sharding import Tiled

FIGURES = ("balance", "z", "entropy", "dropped")
"""Names of the sums that ``ExpertLoad`` keeps for each layer, in addition to the rows per expert: the balance loss, the
z-loss, the entropy of the router's probabilities, and the number of dropped rows."""


class CountedRouter(Tiled):
    """Base class for routers. ``ExpertLoad`` counts the choices of these routers."""

    load: ExpertLoad | None = None
    """The object that counts this router's choices. None if nothing counts them."""


class ExpertLoad:
    """Counts the rows of each expert during a step, and remembers the counts of the previous step.

    A token that chose K experts counts as K rows.
    """

    def __init__(self, run: RunConfig, grid: Grid, device: torch.device) -> None:
        model = run.model
        self.run, self.grid, self.experts, self.chosen = run, grid, model.num_experts, model.num_experts_per_tok
        self.tokens: Tensor | int = 1
        """Number of tokens in the step over all ranks, without padding."""
        shape = (model.num_hidden_layers + model.num_nextn_predict_layers, self.experts)
        self.rows_LE = torch.zeros(shape, dtype=torch.float64, device=device)
        """Number of rows per layer and expert in the most recent step that changed the weights, including dropped
        rows. Zero before the first step."""
        self.counting = False
        """Whether a training step is running. Otherwise nothing is counted, and the balance loss and the z-loss have no
        gradients."""
        self.factor: Tensor | float = 0.0
        """The loss scale divided by the number of tokens. Losses that are sums over tokens are multiplied by this
        factor."""
        self.planned: Sequence[float] | None = None
        """The relative load of each expert, for ``fourfold trace``. A trace has no data to count, so it assumes this
        load."""
        self._sums = torch.zeros(shape[0], self.experts + len(FIGURES), dtype=torch.float64, device=device)

    def watch(self, model: nn.Module) -> None:
        """Make the routers of a model report their choices to this object."""
        for router in model.modules():
            if isinstance(router, CountedRouter):
                router.load = self

    def begin(self, loss_scale: float, micro_batches: Sequence[MicroBatch[Tensor]]) -> None:
        """Start counting for a step with these micro-batches. ``loss_scale`` is the factor of fp16's loss scaling."""
        self._sums.zero_()
        self.tokens = self._data_tokens([batch.is_data for batch in micro_batches if batch.is_data is not None])
        self.factor, self.counting = loss_scale / self.tokens, True

    def _data_tokens(self, masks_BS: Sequence[Tensor]) -> Tensor | int:
        """Return the number of tokens in the step over all ranks, without padding.

        The masks are False for padding. Either all processes have masks, or no process has one. So all processes call
        the collective, or none does.
        """
        if not masks_BS:
            return self.run.training.global_batch_size * self.run.training.seq_length
        mine = torch.stack([is_data_BS.sum() for is_data_BS in masks_BS]).sum()
        return all_reduce(mine, self.grid.tokens, "data tokens").clamp(min=1)

    def finish(self) -> None:
        """Sum the counts over all ranks. The ranks of the tensor axis y count the same rows, so divide by their
        number."""
        self.counting = False
        with purpose("load of experts"):
            dist.all_reduce(self._sums)
        self._sums /= self.grid.y.size

    @torch.no_grad()
    def advance(self, shards: Iterable[LocalShard]) -> None:
        """Keep this step's counts for the next step, and update the bias of each expert in the routers.

        Call this after the optimizer step.
        """
        self.rows_LE.copy_(self._sums[:, : self.experts])
        rate = self.run.moe.bias_update_rate
        if rate:
            direction_LE = (self.rows_LE.mean(1, keepdim=True) - self.rows_LE).sign()
            for shard in shards:
                if is_router_bias(shard.name):  # The name is "layers.3.mlp.…" in layer 3.
                    layer = int(shard.name.split(".")[1])
                    shard.local.add_(direction_LE[layer].to(shard.local.dtype), alpha=rate)

    def rows(self) -> list[list[int]]:
        """Return ``rows_LE`` as integers, for a checkpoint: the number of rows per expert, for each layer."""
        return self.rows_LE.long().tolist()

    def set_rows(self, rows: Sequence[Sequence[int]]) -> None:
        """Restore the counts that ``rows`` returned, from a checkpoint."""
        self.rows_LE.copy_(torch.tensor(rows, dtype=torch.float64))

    def planned_rows(self, rows: int) -> list[int]:
        """Return how many of a rank's rows go to each expert. Only ``fourfold trace`` calls this, because a trace has
        no data.

        The rows are distributed in the proportions of ``planned``. Rows above the capacity are dropped.
        """
        assert self.planned is not None
        total, ends = sum(self.planned), [0.0]
        for share in self.planned:
            ends.append(ends[-1] + share)
        places = [round(rows * end / total) for end in ends]
        found = [end - begin for begin, end in itertools.pairwise(places)]
        factor = self.run.moe.capacity_factor
        return [min(each, math.ceil(factor * rows / self.experts)) for each in found] if factor else found

    def figures(self) -> dict[str, float]:
        """Return metrics of the most recently counted step, over all ranks. This makes the host wait for the device.

        - expert_load: in each layer, the rows of the busiest expert, divided by the mean rows per expert. The metric is
          the highest ratio of all layers.
        - dropped_share: the fraction of rows that were dropped.
        - router_entropy: the entropy of the router's probabilities in nats, averaged over tokens and layers.
        - balance_loss and router_z_loss: averaged over tokens, summed over layers, and not multiplied by their
          coefficients. A layer with an even load has a balance loss of 1.
        """
        sums = self._sums[self.run.model.first_k_dense_replace :]
        rows_LE, layers = sums[:, : self.experts], len(sums)
        balance, z, entropy, dropped = (sums[:, self.experts :].sum(0) / self.tokens).tolist()
        return {
            "expert_load": float((rows_LE.amax(1) / rows_LE.mean(1)).max()),
            "dropped_share": dropped / layers / self.chosen,
            "router_entropy": entropy / layers,
            "balance_loss": balance,
            "router_z_loss": z,
        }

    def by_layer(self) -> dict[str, list[Any]]:
        """Return metrics of each layer with experts in the most recently counted step, over all ranks.

        - layers: the indices of the layers with experts.
        - tokens_per_expert: the number of tokens that chose each expert, including dropped tokens.
        - dropped_share and router_entropy: as in ``figures``, but for each layer.
        """
        first = self.run.model.first_k_dense_replace
        sums = self._sums[first:]
        figures = dict(zip(FIGURES, (sums[:, self.experts :] / self.tokens).T, strict=True))
        return {
            "layers": list(range(first, first + len(sums))),
            "tokens_per_expert": sums[:, : self.experts].long().tolist(),
            "dropped_share": (figures["dropped"] / self.chosen).tolist(),
            "router_entropy": figures["entropy"].tolist(),
        }

    def with_losses(self, logits_TE: Tensor, layer: int, is_data_T: Tensor | None) -> Tensor:
        """Return the router's logits unchanged. The backward pass adds the gradients of the balance loss and z-loss."""
        moe = self.run.moe
        if not self.counting or not (moe.load_balancing_loss or moe.z_loss):
            return logits_TE
        return _WithLosses.apply(logits_TE, self, self._factors_E(layer), is_data_T)

    @torch.no_grad()
    def count(self, layer: int, logits_TE: Tensor, rows_E: Tensor, is_data_T: Tensor | None) -> None:
        """Add some tokens to the sums of a layer: their rows per expert, their losses, and their entropies."""
        if not self.counting:
            return
        probabilities_TE, z_T = router_probabilities(logits_TE, self.run.model), logits_TE.logsumexp(-1).square()
        if is_data_T is not None:
            probabilities_TE, z_T = probabilities_TE * is_data_T[:, None], z_T * is_data_T
        balance = (probabilities_TE @ self._factors_E(layer)).sum()
        entropy, z = torch.special.entr(probabilities_TE).sum(), z_T.sum()
        figures = torch.stack([balance, z, entropy, torch.zeros_like(z)])
        self._sums[layer] += torch.cat([rows_E.double(), figures.double()])

    def count_dropped(self, layer: int, rows: Tensor) -> None:
        """Add ``rows`` to the number of rows that a layer has dropped."""
        if self.counting:
            self._sums[layer, self.experts + FIGURES.index("dropped")] += rows

    def _factors_E(self, layer: int) -> Tensor:
        """Return E · f_e for each expert of a layer, in float32 (see the module's docstring). This is the expert's
        number of rows in the previous step, relative to the mean over the experts. It is 1 if the load is even, and
        before the first step."""
        rows_E = self.rows_LE[layer]
        total = rows_E.sum()
        return torch.where(total > 0, self.experts * rows_E / total.clamp(min=1), 1.0).float()


def router_probabilities(logits_TE: Tensor, model: ModelConfig) -> Tensor:
    """Return the router's probabilities P_te of each token. They sum to one over the experts."""
    if model.router_score == "softmax":
        return logits_TE.softmax(-1)
    scores_TE = logits_TE.sigmoid()
    return scores_TE / scores_TE.sum(-1, keepdim=True)


class _WithLosses(Function):
    """Returns the logits unchanged. The backward pass adds the gradients of the balance loss and the z-loss."""

    @staticmethod
    def forward(
        ctx: Context[ExpertLoad], logits_TE: Tensor, load: ExpertLoad, factors_E: Tensor, is_data_T: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(logits_TE, factors_E, is_data_T)
        ctx.kept = load
        return logits_TE.view_as(logits_TE)

    @staticmethod
    def backward(ctx: Context[ExpertLoad], grad_TE: Tensor) -> tuple[Tensor, None, None, None]:
        (logits_TE, factors_E, is_data_T), load = ctx.saved_tensors, ctx.kept
        model, moe = load.run.model, load.run.moe
        factor = load.factor if is_data_T is None else load.factor * is_data_T[:, None]
        if moe.load_balancing_loss:
            # The balance loss of a token is Σ c_e P_e, with c_e = E f_e. P_e is the router's probability of expert e.
            # The gradient of the loss with respect to logit e is slope_e · (c_e − Σ c P). slope_e is P_e for softmax
            # scores, and P_e · (1 − s_e) for sigmoid scores s. Subtract 1 from every c_e. This does not change the
            # gradient, but makes it exactly zero for an even load.
            probabilities_TE = router_probabilities(logits_TE, model)
            slope_TE = (
                probabilities_TE if model.router_score == "softmax" else probabilities_TE * (-logits_TE).sigmoid()
            )
            uneven_E = factors_E - 1
            above_TE = uneven_E - (probabilities_TE @ uneven_E)[:, None]
            grad_TE = grad_TE + slope_TE * above_TE * (moe.load_balancing_loss * factor)
        if moe.z_loss:
            normalizer_T1 = logits_TE.logsumexp(-1, keepdim=True)
            z_TE = (logits_TE - normalizer_T1).exp() * (2 * normalizer_T1)
            grad_TE = grad_TE + z_TE * (moe.z_loss * factor)
        return grad_TE, None, None, None
