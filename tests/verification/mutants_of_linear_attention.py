"""Faults in linear attention (Gated DeltaNet), and in the gate of attention's output."""

from __future__ import annotations

from mutants import CP2, PACKED, ULYSSES, X2, X2Y2, Mutant
from tiny_runs import HYBRID

MIX = "parallel.attention.delta_core:SharedDeltaCore.mix"
FORWARD = "parallel.attention.delta_core:SharedDeltaCore.forward"
RULE = "models.delta_net:gated_delta_rule"
CORE_MIX = "models.delta_net:DeltaCore.mix"
THREE_HEADS = HYBRID | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
"""Three key heads do not divide over x·y = 4, so y shares the batch."""

LINEAR_ATTENTION = [
    Mutant(
        "with cp, linear attention ignores document boundaries",
        MIX,
        "super().mix(q, k, v, b, a, context, *mine)",
        "super().mix(q, k, v, b, a, AttentionContext(), *mine)",
        HYBRID,
        CP2,
        PACKED,
        "plain",
    ),
    Mutant(
        "every cp rank starts linear attention with an empty state",
        MIX,
        """
        q, k, v, b, a = gather_sequence(self.cp, q, k, v, b, a)
        mine = (parameter.chunk(self.cp.size)[self.cp.rank] for parameter in parameters)
        return scatter_sequence(super().mix(q, k, v, b, a, context, *mine), self.cp)
        """,
        "return super().mix(q, k, v, b, a, context, *parameters)",
        HYBRID,
        ULYSSES,
        {},
        "plain",
    ),
    Mutant(
        "every cp rank uses the linear attention parameters of the first rank's heads",
        MIX,
        "parameter.chunk(self.cp.size)[self.cp.rank]",
        "parameter.chunk(self.cp.size)[0]",
        HYBRID,
        CP2,
        {},
        "plain",
    ),
    Mutant(
        "a cp rank uses the decay parameters of other heads",
        MIX,
        "mine = (parameter.chunk(self.cp.size)[self.cp.rank] for parameter in parameters)",
        """
        *taps, A_log, bias = parameters
        mine = [tap.chunk(self.cp.size)[self.cp.rank] for tap in taps]
        mine += [A_log[self.cp.rank :: self.cp.size], bias[self.cp.rank :: self.cp.size]]
        """,
        HYBRID,
        ULYSSES,
        {},
        "plain",
    ),
    Mutant(
        "the gradient of linear attention's gated norm is not summed over y",
        "parallel.tensor.norm:HeadNorm.__init__",
        'Tile(partial_over=("x", "y"))',
        'Tile(partial_over=("x",))',
        HYBRID | {"qk_norm": False},
        X2Y2,
        {},
        "plain",
    ),
    Mutant(
        "if y splits the sequences, the gradients of convolutions and decays are not summed over y",
        "parallel.attention.delta_core:SharedDeltaCore.__init__",
        "NORMAL_BIAS[OVER_Y[split]]",
        'NORMAL_BIAS["replicate"]',
        THREE_HEADS,
        X2Y2,
        {},
        "plain",
    ),
    Mutant(
        "linear attention's output gate has its tokens in rank order, not in sequence order",
        FORWARD,
        "q, k, v, z, b, a = (whole_sequences(t, self.x.size) for t in (q, k, v, z, b, a))",
        "q, k, v, b, a = (whole_sequences(t, self.x.size) for t in (q, k, v, b, a))\n"
        "z = z.reshape(q.shape[0], q.shape[1], -1)",
        HYBRID,
        X2Y2,
        {},
        "plain",
    ),
    Mutant(
        "if y splits the sequences, linear attention uses the document boundaries of the first sequences",
        FORWARD,
        "slice(self.y.rank * len(q), (self.y.rank + 1) * len(q))",
        "slice(0, len(q))",
        THREE_HEADS,
        X2Y2,
        PACKED,
        "plain",
    ),
    Mutant(
        "the state of linear attention leaks into the next document",
        CORE_MIX,
        "gated_delta_rule(q_BSND, k_BSND, v_BSNE, log_decay_BSN, b.float().sigmoid(), documents_BS)",
        "gated_delta_rule(q_BSND, k_BSND, v_BSNE, log_decay_BSN, b.float().sigmoid(), None)",
        HYBRID,
        X2,
        PACKED,
    ),
    Mutant(
        "the state of linear attention leaks into a document that starts at a chunk boundary",
        "models.delta_net:_decays",
        "reads * (documents_B1nc == before_B1n1), writes * (documents_B1nc == last_B1n1)",
        "reads, writes * (documents_B1nc == last_B1n1)",
        HYBRID,
        X2,
        PACKED | {"training": {"seq_length": 96}},
    ),
    Mutant(
        "the convolution of linear attention leaks into the next document",
        CORE_MIX,
        "short_convolution(t.float(), weight, documents_BS)",
        "short_convolution(t.float(), weight, None)",
        HYBRID,
        X2,
        PACKED,
    ),
    Mutant(
        "the convolution of linear attention does not read the last tokens of the previous cp rank",
        "models.delta_net:short_convolution",
        "F.pad(x_BSC[:, :-back], (0, 0, back, 0))",
        "F.pad(x_BSC.unflatten(1, (4, -1))[:, :, :-back], (0, 0, back, 0)).flatten(1, 2)",
        HYBRID,
        ULYSSES,
    ),
    Mutant(
        "the weights of linear attention's convolution are in reverse order",
        "models.delta_net:short_convolution",
        "weight_CT[:, -1 - back]",
        "weight_CT[:, back - 1]",
        HYBRID,
    ),
    Mutant(
        "the state of linear attention decays after a token's update, not before it",
        RULE,
        "_decays(decay, documents_BS)",
        "_decays(decay - _chunks(log_decay_BSN), documents_BS)",
        HYBRID,
        X2,
    ),
    Mutant(
        "the delta rule writes the full correction, without the learned factor beta",
        CORE_MIX,
        "b.float().sigmoid()",
        "torch.ones_like(b.float())",
        HYBRID,
        X2,
    ),
    Mutant(
        "the delta rule writes values without subtracting the state's prediction",
        RULE,
        "fresh_c - corrections_c @ state",
        "fresh_c",
        HYBRID,
        X2,
        {"training": {"seq_length": 96}},
    ),
    Mutant(
        "linear attention assigns key heads to the wrong value heads",
        "models.delta_net:unit_heads",
        "t_BSKD.repeat_interleave(heads // t_BSKD.shape[2], dim=2)",
        "t_BSKD.repeat(1, 1, heads // t_BSKD.shape[2], 1)",
        HYBRID,
        X2,
    ),
    Mutant(
        "queries of linear attention are not divided by the square root of their width",
        CORE_MIX,
        "q_BSND = q_BSND * self.key_width**-0.5",
        "pass",
        HYBRID,
        X2,
    ),
    Mutant(
        "queries and keys of linear attention are not normalized to length 1",
        "models.delta_net:unit_heads",
        "t_BSKD = t_BSKD * (t_BSKD.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()",
        "pass",
        HYBRID,
        X2,
    ),
    Mutant(
        "the decays of linear attention lack their bias",
        CORE_MIX,
        "F.softplus(a.float() + dt_bias_N)",
        "F.softplus(a.float())",
        HYBRID,
        X2,
    ),
    Mutant(
        "linear attention's gated norm multiplies by the gate before it normalizes, not after",
        "models.delta_net:DeltaCore.compute",
        "self.norm(out_BSNE) * gate_BSNE",
        "self.norm(out_BSNE * gate_BSNE)",
        HYBRID,
        X2,
    ),
    Mutant(
        "the gate of attention's output has no sigmoid",
        "models.transformer:Attention.forward",
        "gate[0].sigmoid()",
        "gate[0]",
        HYBRID,
        X2,
    ),
    Mutant(
        "attention's output is multiplied by the gate of other heads",
        "models.transformer:Attention.forward",
        "gate[0].sigmoid()",
        "gate[0].roll(8, -1).sigmoid()",
        HYBRID,
        X2,
    ),
]
