"""List faults in GPT-OSS's features: sinks, biases of experts and routers, the clamped activation, and its files."""

from __future__ import annotations

from mutants import CP2, ONE_SEQUENCE, PACKED, SIX_HEADS, ULYSSES, X2, X2Y2, Y2, Mutant
from tiny_runs import GPT_OSS

SINKS_ONLY = {"attention_sinks": True}

SINKS = [
    Mutant(
        "ring attention leaves sinks out of its merged results",
        "parallel.attention.ring:_Ring.forward",
        "out_BNTD.mul_(share_BNT[..., None])",
        "pass",
        GPT_OSS,
        CP2,
    ),
    Mutant(
        "the sinks' gradient covers only one cp rank's tokens",
        "parallel.attention.ring:_Ring.backward",
        "sink_gradient(grad_BNTD, out, lse, sinks_N)",
        "sink_gradient(grad_BNTD, out, lse, sinks_N) * (cp.rank == 0)",
        GPT_OSS,
        CP2,
    ),
    Mutant(
        "with Ulysses, every rank uses the sinks of the first rank's heads",
        "parallel.attention.attention:SharedAttentionCore.attend",
        "self.sinks.chunk(self.cp.size)[self.cp.rank]",
        "self.sinks.chunk(self.cp.size)[0]",
        GPT_OSS,
        ULYSSES,
    ),
    Mutant(
        "packed attention leaves sinks out of its results",
        "parallel.attention.document_attention:_add_sinks",
        "out_BSND.mul_(_by_row(share_NT, out_BSND).transpose(1, 2)[..., None])",
        "pass",
        GPT_OSS,
        {},
        PACKED,
    ),
    Mutant(
        "the backward of packed attention uses log-sum-exps without sinks",
        "parallel.attention.block_attention:join_sinks",
        "return (lse_NT - all_NT).exp_(), all_NT",
        "return (lse_NT - all_NT).exp_(), lse_NT",
        GPT_OSS,
        {},
        PACKED,
    ),
    Mutant(
        "the sinks' gradient has the wrong sign",
        "parallel.attention.block_attention:sink_gradient",
        "(weights_NT * projected_NT).sum(-1).view(-1, len(sinks_N)).sum(0).neg()",
        "(weights_NT * projected_NT).sum(-1).view(-1, len(sinks_N)).sum(0)",
        GPT_OSS,
        X2,
    ),
    Mutant(
        "if y splits the queries, the sinks' gradient is not summed over y",
        "parallel.attention.attention:SharedAttentionCore.__init__",
        'self.add_tile("sinks", core.sinks, NORMAL_BIAS[OVER_Y[split]], grid)',
        'self.add_tile("sinks", core.sinks, replace(NORMAL_BIAS[OVER_Y[split]], partial_over=()), grid)',
        SIX_HEADS | SINKS_ONLY,
        X2Y2,
        ONE_SEQUENCE,
        "plain",
    ),
    Mutant(
        "if y splits the queries, attention has no sinks",
        "parallel.attention.attention:SharedAttentionCore._attend_some_queries",
        "attend_masked(q, k, v, mask_B1QS, scores, self.sinks)",
        "attend_masked(q, k, v, mask_B1QS, scores, None)",
        SIX_HEADS | SINKS_ONLY,
        X2Y2,
        ONE_SEQUENCE,
        "plain",
    ),
]

BIASES = [
    Mutant(
        "every x rank adds the bias of the experts' down projections",
        "parallel.experts.experts:ParallelExperts.down",
        "bias is None or self.x.rank == 0",
        "True",
        GPT_OSS,
        X2,
    ),
    Mutant(
        "the biases of the experts' down projections get gradients that are not summed over x",
        "parallel.experts.experts:ParallelExperts.__init__",
        'Tile(ep=0, y=1, partial_over=("x",))',
        "Tile(ep=0, y=1)",
        GPT_OSS,
        X2,
    ),
    Mutant(
        "every y rank adds the biases of gate and up",
        "parallel.experts.experts:ParallelExperts.forward",
        'add_biases(sum_of(grouped_matmul(rows_Nh, weight, groups), self.y, "experts: outputs of up"), bias, groups)',
        'sum_of(add_biases(grouped_matmul(rows_Nh, weight, groups), bias, groups), self.y, "experts: outputs of up")',
        GPT_OSS,
        Y2,
    ),
    Mutant(
        "the gradient of the router's biases covers only one rank's tokens",
        "parallel.experts.router:ParallelRouter.__init__",
        'Tile(partial_over=("x",))',
        "Tile()",
        GPT_OSS,
        X2,
    ),
    Mutant(
        "rows get the bias of the next expert",
        "models.grouped:Groups.of_rows",
        "torch.searchsorted(self.ends_E, places_N, right=True)",
        "torch.searchsorted(self.ends_E, places_N, right=True) + 1",
        GPT_OSS,
        X2,
    ),
]

ACTIVATION = [
    Mutant(
        "the output of gate is not clamped",
        "models.mlp:_ClampedSwiGLU.forward",
        "gate.clamp(max=limit)",
        "gate",
        GPT_OSS,
    ),
    Mutant(
        "the output of up is used without adding one",
        "models.mlp:_ClampedSwiGLU.forward",
        "(up + 1) * (gate * torch.sigmoid(SLOPE * gate))",
        "up * (gate * torch.sigmoid(SLOPE * gate))",
        GPT_OSS,
    ),
    Mutant(
        "values of gate that are clamped get a gradient",
        "models.mlp:_ClampedSwiGLU.backward",
        "d_gate.mul_(up.clamp(-limit, limit).add_(1)).mul_(grad).mul_(gate <= limit)",
        "d_gate.mul_(up.clamp(-limit, limit).add_(1)).mul_(grad)",
        GPT_OSS,
    ),
    Mutant(
        "the weights of the experts' outputs are a softmax over all experts, not over the chosen experts",
        "models.mixture:Choice.weights",
        "self.normalize",
        "False",
        GPT_OSS,
    ),
    Mutant(
        "YaRN's bounds are rounded to whole channels",
        "models.rope:_yarn",
        "scaling.truncate",
        "True",
        GPT_OSS,
    ),
]

FILES = [
    Mutant(
        "gate and up are converted as if the file stored them one after the other, not interleaved",
        "huggingface.weight_names:_their_tensor",
        "groups = min(rows)",
        "groups = 1",
        GPT_OSS,
    ),
    Mutant(
        "square weights of experts are not transposed when they are converted",
        "huggingface.weight_names:TheirTensor._joined",
        "whole.T.contiguous() if self.transposed else whole",
        "whole.T.contiguous() if self.transposed and whole.shape[0] != whole.shape[1] else whole",
        GPT_OSS | {"intermediate_size": 64, "moe_intermediate_size": 64},
    ),
]

GPT_OSS_FAULTS = [*SINKS, *BIASES, *ACTIVATION, *FILES]
"""All faults of this file. Parity must catch each of them."""
