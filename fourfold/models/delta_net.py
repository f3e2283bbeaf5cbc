"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), a kind of linear attention. Each head has a state of fixed size.
A token updates this state instead of adding a key and a value to a cache.

Shapes: B sequences, S tokens, H hidden size, N value heads, D width of a key head, E width of a value head, C channels.
Each sequence has n chunks of c tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.layout import LINEAR_CHUNK
from fourfold.config.model import ModelConfig
from fourfold.models.causal_attention import AttentionContext, documents_of
from fourfold.models.mlp import Linears
from fourfold.models.norms import RMSNorm
from fourfold.models.recomputation import recomputable

NORM_EPS = 1e-6
"""This number is added to the squared length of a query or key, so that scaling to length 1 never divides by zero."""


class DeltaNet(nn.Module):
    """Linear attention. It replaces softmax attention in a block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        heads = config.linear_num_value_heads
        values = heads * config.linear_value_head_dim
        widths = {"q_proj": keys, "k_proj": keys, "v_proj": values, "z_proj": values, "b_proj": heads, "a_proj": heads}
        self.inputs = Linears(config.hidden_size, False, **widths)
        self.core = DeltaCore(config)
        self.o_proj = nn.Linear(values, config.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor, context: AttentionContext) -> Tensor:
        out_BSH: Tensor = self.o_proj(self.core(*self.inputs(x_BSH), context))
        return out_BSH


class DeltaCore(nn.Module):
    """Computes everything between the input and output projections, in float32: short convolutions, the delta rule, and
    the gated norm."""

    CHANNELS = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias")
    """Names of the parameters that tensor parallelism splits by heads. The convolutions have one row per channel, and
    the other two parameters have one value per head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        heads, taps = config.linear_num_value_heads, config.linear_conv_kernel_dim
        keys, values = config.linear_num_key_heads * self.key_width, heads * self.value_width
        self.q_conv = nn.Parameter(torch.empty(keys, taps))
        self.k_conv = nn.Parameter(torch.empty(keys, taps))
        self.v_conv = nn.Parameter(torch.empty(values, taps))
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm: nn.Module = RMSNorm(self.value_width, config.norm_eps)

    @recomputable
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, a: Tensor, context: AttentionContext
    ) -> Tensor:
        return self.compute(q, k, v, z, b, a, context)

    def compute(
        self, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, a: Tensor, context: AttentionContext
    ) -> Tensor:
        """Compute the gated outputs of the heads. All inputs except ``context`` are outputs of ``DeltaNet.inputs``.

        Args:
            q: the queries, [B, S, C].
            k: the keys, [B, S, C].
            v: the values, [B, S, N·E].
            z: the gate of the outputs, before SiLU, [B, S, N·E].
            b: the logits of beta (``gated_delta_rule``), [B, S, N].
            a: the inputs that the decays are computed from, [B, S, N].
            context: the ends of the documents.

        Returns:
            The gated outputs, [B, S, N·E].
        """
        out_BSNE = self.mix(q, k, v, b, a, context, *(getattr(self, name) for name in self.CHANNELS))
        gate_BSNE = F.silu(z.float()).unflatten(-1, (-1, self.value_width))
        gated_BSNE: Tensor = self.norm(out_BSNE) * gate_BSNE
        return gated_BSNE.to(z.dtype).flatten(-2)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, context: AttentionContext, *parameters: Tensor
    ) -> Tensor:
        """Run the convolutions and the delta rule, and return the outputs of the heads, [B, S, N, E].

        Args:
            q: as in ``compute``.
            k: as in ``compute``.
            v: as in ``compute``.
            b: as in ``compute``.
            a: as in ``compute``.
            context: as in ``compute``.
            parameters: the parameters that ``CHANNELS`` names, in the order of ``CHANNELS``.
        """
        *convolutions, A_log_N, dt_bias_N = (parameter.float() for parameter in parameters)
        ends_BE = context.document_ends_BE
        documents_BS = None if ends_BE is None else documents_of(ends_BE, q.shape[1])
        q, k, v = (
            short_convolution(t.float(), weight, documents_BS)
            for t, weight in zip((q, k, v), convolutions, strict=True)
        )
        q_BSND, k_BSND = (unit_heads(t, self.key_width, len(A_log_N)) for t in (q, k))
        v_BSNE = v.unflatten(-1, (-1, self.value_width))
        log_decay_BSN = -A_log_N.exp() * F.softplus(a.float() + dt_bias_N)
        q_BSND = q_BSND * self.key_width**-0.5
        return gated_delta_rule(q_BSND, k_BSND, v_BSNE, log_decay_BSN, b.float().sigmoid(), documents_BS)


def short_convolution(x_BSC: Tensor, weight_CT: Tensor, documents_BS: Tensor | None) -> Tensor:
    """Convolve each channel causally with its own T weights, and apply SiLU. The last weight is for the current token.

    The convolution does not read tokens of other documents.
    """
    length, taps = x_BSC.shape[1], weight_CT.shape[1]
    out_BSC = x_BSC * weight_CT[:, -1]
    for back in range(1, min(taps, length)):
        earlier_BSC = F.pad(x_BSC[:, :-back], (0, 0, back, 0))
        if documents_BS is not None:
            is_same_BS = F.pad(documents_BS[:, :-back], (back, 0), value=-1) == documents_BS
            earlier_BSC = earlier_BSC * is_same_BS[..., None]
        out_BSC = out_BSC + earlier_BSC * weight_CT[:, -1 - back]
    return F.silu(out_BSC)


def unit_heads(t_BSf: Tensor, width: int, heads: int) -> Tensor:
    """Split channels into heads, and scale each head's vector to length 1.

    Returns:
        One query or key vector per value head, [B, S, N, D]. If there are fewer key heads than value heads, each key
        head is repeated.
    """
    t_BSKD: Tensor = t_BSf.unflatten(-1, (-1, width))
    t_BSKD = t_BSKD * (t_BSKD.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
    return t_BSKD.repeat_interleave(heads // t_BSKD.shape[2], dim=2)


def gated_delta_rule(
    q_BSND: Tensor,
    k_BSND: Tensor,
    v_BSNE: Tensor,
    log_decay_BSN: Tensor,
    beta_BSN: Tensor,
    documents_BS: Tensor | None = None,
) -> Tensor:
    """Run the recurrence of each head (arXiv 2412.06464, eq. 10).

    A token first multiplies the state [D, E] by its decay. Then its key reads the value k·state. The token changes the
    state so that this value moves towards v, by the fraction beta:

        state ← exp(log_decay) · state
        state ← state + k ⊗ beta · (v − k·state)

    The state is zero at the start of each document. Matmuls compute all tokens of a chunk at once (section 3.3). A loop
    passes the state from chunk to chunk.

    Args:
        q_BSND: the queries.
        k_BSND: the keys, scaled to length 1.
        v_BSNE: the values.
        log_decay_BSN: the logarithm of each token's decay.
        beta_BSN: the fraction beta of each token.
        documents_BS: the index of each token's document. None if each sequence is one document.

    Returns:
        The outputs q·state of all tokens, [B, S, N, E].
    """
    length = q_BSND.shape[1]
    q, k, v = (_chunks(t) for t in (q_BSND, k_BSND, v_BSNE))  # [B, N, n, c, ·]
    decay, beta = _chunks(log_decay_BSN).cumsum(-1), _chunks(beta_BSN)[..., None]
    pair, reads, writes = _decays(decay, documents_BS)
    k_beta = beta * k
    system = (k_beta @ k.mT) * pair
    known = torch.cat([beta * v, k_beta * reads], -1)
    solved = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    fresh, corrections = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside, q_reads, k_writes = (q @ k.mT) * pair, q * reads, k * writes
    state, outputs = torch.zeros_like(k[:, :, 0].mT @ v[:, :, 0]), list[Tensor]()
    # Index with ``unbind``, because the gradient of t[:, :, chunk] is as large as all of t. The backward pass would
    # compute one such gradient for each chunk, and its time would be quadratic in the number of chunks.
    each_chunk = (t.unbind(2) for t in (fresh, corrections, q_reads, inside, k_writes, reads[:, :, :, -1:]))
    for fresh_c, corrections_c, q_c, inside_c, k_c, decay in zip(*each_chunk, strict=True):
        values = fresh_c - corrections_c @ state
        outputs.append(q_c @ state + inside_c @ values)
        state = state * decay + k_c.mT @ values
    return torch.stack(outputs, 2).flatten(2, 3)[:, :, :length].transpose(1, 2)


def _chunks(t_BSN: Tensor) -> Tensor:
    """Split a tensor [B, S, N, …] into chunks [B, N, n, c, …]. Pad the last chunk with zeros."""
    missing = -t_BSN.shape[1] % LINEAR_CHUNK
    padded_BSN = F.pad(t_BSN, (0, 0) * (t_BSN.ndim - 2) + (0, missing))
    chunks_BncN: Tensor = padded_BSN.unflatten(1, (-1, LINEAR_CHUNK))
    return chunks_BncN.movedim(3, 1)


def _decays(decay_BNnc: Tensor, documents_BS: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return how much of a token's write to the state is left when a later token reads the state, as a factor.

    Args:
        decay_BNnc: The logarithm of the total decay from the beginning of the chunk up to and including each token.
        documents_BS: The document of each token. Factors between tokens of different documents are 0.

    Returns:
        Three tensors of factors.

        - From each token (last dim) to itself and to each later token of the chunk (second-last dim), [B, N, n, c, c].
        - From the state before the chunk to each token, [B, N, n, c, 1].
        - From each token to the state after the chunk, [B, N, n, c, 1].
    """
    is_seen = torch.ones(LINEAR_CHUNK, LINEAR_CHUNK, dtype=torch.bool, device=decay_BNnc.device).tril(-1)
    # A token reads its own write before any decay, so this factor is 1. Write it as a constant and not as exp(decay −
    # decay). Autograd would differentiate the difference, with rounding errors larger than the gradients of fast
    # decays.
    own = torch.eye(LINEAR_CHUNK, dtype=decay_BNnc.dtype, device=decay_BNnc.device)
    reads, writes = decay_BNnc.exp(), F.pad((decay_BNnc[..., -1:] - decay_BNnc[..., :-1]).exp(), (0, 1), value=1.0)
    if documents_BS is not None:
        documents_B1nc = _chunks(documents_BS[..., None])
        last_B1n1 = documents_B1nc[..., -1:]
        before_B1n1 = F.pad(last_B1n1[:, :, :-1], (0, 0, 1, 0))
        is_seen = is_seen & (documents_B1nc[..., :, None] == documents_B1nc[..., None, :])
        reads, writes = reads * (documents_B1nc == before_B1n1), writes * (documents_B1nc == last_B1n1)
    pair = (decay_BNnc[..., :, None] - decay_BNnc[..., None, :]).masked_fill(~is_seen, -torch.inf).exp()
    return pair + own, reads[..., None], writes[..., None]
