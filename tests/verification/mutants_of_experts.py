"""Faults of mixtures of experts, most of them published ones of other programs."""

from __future__ import annotations

from typing import Any

from mutants import FULL, ONE_SEQUENCE, Mutant
from tiny_runs import DEEPSEEK, MIXTURE, QWEN_MOE

LOSSES = {"moe": {"load_balancing_loss": 0.5, "z_loss": 0.01}}
BIAS = {"moe": {"bias_update_rate": 0.02}}
CAPACITY = {"moe": {"capacity_factor": 0.75}}
EP2, X2EP2, Y2EP2 = {"dp": 2, "ep": 2}, {"x": 2, "dp": 2, "ep": 2}, {"y": 2, "dp": 2, "ep": 2}
EP2DP4, EP2Z4 = {"dp": 4, "ep": 2}, {"z": 4, "ep": 2}


def on_grid(
    fault: str, module: str, old: str, new: str, model: dict[str, Any], grid: dict[str, int], sections: Any = None
) -> Mutant:
    """A fault in the code of the grid, of which the decoder in plain PyTorch has nothing: it is the reference."""
    return Mutant(fault, module, old, new, model, grid, sections or {}, against="plain")


EXPERTS = [
    on_grid(
        "the router gets no gradient from the experts",
        "parallel.experts:ParallelMixture.forward",
        'sum_gradient(routing.weights_TK, self.grid.y, "router: weights\' gradient")',
        "routing.weights_TK.detach()",
        MIXTURE,
        EP2,
        LOSSES,
    ),
    on_grid(
        "the router's gradient is that of one rank's channels",
        "parallel.experts:ParallelMixture.forward",
        'sum_gradient(routing.weights_TK, self.grid.y, "router: weights\' gradient")',
        "routing.weights_TK",
        MIXTURE,
        Y2EP2,
    ),
    on_grid(
        "the router's gradient is that of one rank's tokens",
        "parallel.router:ParallelRouter.__init__",
        'Tile(y=1, partial_over=("x",))',
        "Tile(y=1)",
        MIXTURE,
        X2EP2,
    ),
    on_grid(
        "experts' gradients are summed over the ranks with other experts too",
        "parallel.replicated:Replicated.materialize",
        "self.grid.expert_replicas",
        "self.grid.replicas",
        MIXTURE,
        EP2,
    ),
    on_grid(
        "experts' gradients are not summed over the ranks with the same experts",
        "parallel.replicated:Replicated.materialize",
        "self.grid.expert_replicas",
        "self.grid.x",
        MIXTURE,
        EP2DP4,
        ONE_SEQUENCE,
    ),
    on_grid(
        "the gradient norm leaves the experts out",
        "parallel.state:clip_gradients",
        "weights = [1.0 / shard.replicas for shard in shards if shard.grad is not None]",
        "weights = [(shard.tile.ep is None) / shard.replicas for shard in shards if shard.grad is not None]",
        MIXTURE,
        EP2,
    ),
    on_grid(
        "the gradient norm counts experts as held by as many ranks as other weights",
        "parallel.replicated:Replicated.shard",
        "self.grid.replicas if tile.ep is None else self.grid.expert_replicas",
        "self.grid.replicas",
        MIXTURE,
        EP2,
    ),
    on_grid(
        "the balance loss grows with the ranks",
        "parallel.expert_load:ExpertLoad.begin",
        "loss_scale / self.tokens, True",
        "loss_scale * self.grid.tokens.size / self.tokens, True",
        MIXTURE,
        EP2,
        LOSSES,
    ),
    on_grid(
        "the balance loss is a mean over micro-batches of their own loads",
        "parallel.expert_load:ExpertLoad.with_losses",
        "self._factors_E(layer)",
        "self.experts * router_probabilities(logits_TE, self.run.model).mean(0)",
        MIXTURE,
        EP2,
        LOSSES,
    ),
    on_grid(
        "the load is that of one rank's tokens",
        "parallel.expert_load:ExpertLoad.finish",
        "            dist.all_reduce(self._sums)",
        "            pass",
        MIXTURE,
        EP2,
        LOSSES,
    ),
    on_grid(
        "the z-loss has half its gradient",
        "parallel.expert_load:_WithLosses.backward",
        "(2 * normalizer_T1)",
        "normalizer_T1",
        MIXTURE,
        EP2,
        {"moe": {"z_loss": 0.1}},
    ),
    on_grid(
        "biases follow the load with the wrong sign",
        "parallel.expert_load:ExpertLoad.advance",
        "(self.rows_LE.mean(1, keepdim=True) - self.rows_LE).sign()",
        "(self.rows_LE - self.rows_LE.mean(1, keepdim=True)).sign()",
        DEEPSEEK,
        EP2,
        BIAS,
    ),
    on_grid(
        "the bias counts in the weights of the experts too",
        "parallel.router:ParallelRouter.forward",
        "self.choice.weights(scores_TE, chosen_TK)",
        "self.choice.weights(scores_TE + self.e_score_correction_bias, chosen_TK)",
        DEEPSEEK,
        EP2,
        BIAS,
    ),
    on_grid(
        "the load is forgotten when a run resumes",
        "checkpoints.checkpoint:load_checkpoint",
        "job.expert_load.set_rows(state.expert_rows)",
        "pass",
        MIXTURE,
        EP2,
        LOSSES,
    ),
    on_grid(
        "the shared expert is summed twice",
        "parallel.experts:ParallelMixture.forward",
        "out_BTh + self._shared(x_BTh)",
        "out_BTh + self._shared(x_BTh) + self._shared(x_BTh)",
        QWEN_MOE,
        X2EP2,
    ),
    on_grid(
        "the shared expert's gate has the gradient of one rank's channels",
        "parallel.experts:SharedExpertGate.forward",
        'sum_gradient(logits_BT1.sigmoid(), self.y, "shared expert: gate\'s gradient")',
        "logits_BT1.sigmoid()",
        QWEN_MOE,
        Y2EP2,
    ),
    on_grid(
        "a recomputation chooses experts anew, and rounds otherwise",
        "parallel.router:ParallelRouter.forward",
        "remembered(self, lambda: self.choice.experts(scores_TE, self.e_score_correction_bias))",
        "self.choice.experts(scores_TE.roll(int(RECOMPUTES.get()), 0), self.e_score_correction_bias)",
        MIXTURE,
        EP2,
        FULL,
    ),
    on_grid(
        "the weights of the experts are those of the next token",
        "parallel.experts:ParallelMixture.forward",
        "combine(rows_Nh, order, weights_TK)",
        "combine(rows_Nh, order, weights_TK.roll(1, 0))",
        MIXTURE,
        EP2,
    ),
    on_grid(
        "rows that come back are in the order of the experts of all ranks",
        "parallel.dispatch:Dispatch.back",
        "_permuted(rows_Nh, _inverse(order_N), order_N)",
        "_permuted(rows_Nh, order_N, _inverse(order_N))",
        MIXTURE,
        EP2,
    ),
    on_grid(
        "gradients of dispatched rows go back to other tokens",
        "parallel.dispatch:_permuted",
        "differentiable(rows_Nh, lambda rows: rows[order_N], lambda grad, inverse_N: grad[inverse_N], inverse_N)",
        "differentiable(rows_Nh, lambda rows: rows[order_N], lambda grad, inverse_N: grad[inverse_N], order_N)",
        MIXTURE,
        EP2,
    ),
    on_grid(
        "the gradient of rows gathered over x is that of one rank's features",
        "parallel.communicate:gather_rows",
        "_sum_of_own_rows(g, axis, sizes, why)",
        "g.split(list(sizes))[axis.rank]",
        MIXTURE,
        X2EP2,
    ),
    on_grid(
        "the up projections are not summed over y",
        "parallel.experts:ParallelExperts.forward",
        'sum_of(grouped_product(rows_Nh, weight, sizes), self.y, "experts: outputs of up")',
        "grouped_product(rows_Nh, weight, sizes)",
        MIXTURE,
        Y2EP2,
    ),
    on_grid(
        "the capacity is counted on each rank, not over the sequence",
        "parallel.router:within_capacity_of_sequences",
        "grid.x.size * grid.cp.size == 1",
        "True",
        MIXTURE,
        {"cp": 2, "ep": 2},
        CAPACITY,
    ),
    on_grid(
        "the capacity is taken in the order of ranks, not of tokens",
        "parallel.router:within_capacity_of_sequences",
        "whole_BSK = in_order(parts_nBSK, grid.cp.size)",
        "whole_BSK = parts_nBSK.transpose(0, 1).flatten(1, 2)",
        MIXTURE,
        {"cp": 2, "ep": 2},
        CAPACITY,
    ),
    on_grid(
        "a checkpoint has the experts of the ranks in reverse",
        "checkpoints.file_layout:Layout._rank",
        '(token_copy * pieces + rank) * self._experts(tensor) + tile["ep"]',
        '(token_copy * pieces + rank) * self._experts(tensor) + self._experts(tensor) - 1 - tile["ep"]',
        MIXTURE,
        EP2,
    ),
    on_grid(
        "sharded experts are cut among all ranks of z",
        "parallel.fully_sharded:FullySharded.shard",
        "grid.expert_copies",
        "grid.replicas",
        MIXTURE,
        {"z": 2, "dp": 2, "ep": 4},
    ),
]
