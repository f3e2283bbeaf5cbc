"""Multi-head latent attention on the grid.

In this attention (DeepSeek), a layer projects the hidden states to latents, and then projects the latents to keys and
values. Latents are split like the residual stream: tokens over x, and channels over y. So each rank projects only its
own tokens to latents. The projections from latents to keys and values need the tokens of all x ranks. So the ranks
gather the latents, which are much narrower than the hidden states.
"""

from torch import Tensor

from fourfold.config.layout import AttentionSplit, ContextMethod
from fourfold.models.causal_attention import AttentionContext
from fourfold.models.latent_attention import LatentCore, join_channels, without_padding
from fourfold.models.recomputation import recomputable
from fourfold.parallel.attention.attention import OVER_Y, SharedAttentionCore
from fourfold.parallel.grid.communicate import gather
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.linear import SHARED_DIM, TOKEN_DIM, Linear4D
from fourfold.parallel.tensor.sharding import Tile


class LatentLinear(Linear4D):
    """Projects this rank's own tokens to latents. The weight is [c, H/y], and the output is [B, T, c/y]. c is the width
    of the latents."""

    gathers_tokens = False

    def weight_tile(self) -> Tile:
        return Tile(y=1, partial_over=("x",))


class SharedLatentCore(SharedAttentionCore):
    """Compute latent attention for this rank's share of the heads, sequences, or queries (``SharedAttentionCore``)."""

    def __init__(self, core: LatentCore, grid: Grid, split: AttentionSplit, method: ContextMethod, heads: int) -> None:
        super().__init__(core, grid, split, method, heads, heads)
        self.widths = core.widths
        self.token_dim = TOKEN_DIM[OVER_Y[split]]
        self.shared_dim = None if split == "heads" else SHARED_DIM[OVER_Y[split]]

    @recomputable
    def forward(  # type: ignore[override]  # the core of latent attention has other inputs
        self, q_nope: Tensor, q_rope: Tensor, k_rope: Tensor, k_nope: Tensor, v: Tensor, context: AttentionContext
    ) -> Tensor:
        q, k, v = join_channels(q_nope, q_rope, self._for_my_heads(k_rope), k_nope, v, self.widths)
        return without_padding(self.attend_share(q, k, v, context), self.widths)

    def _for_my_heads(self, k_rope: Tensor) -> Tensor:
        """Gather the rotary channels of the keys, for the same tokens as this rank's other key channels.

        All heads share these channels. So the backward pass sums their gradients over the heads of all ranks.
        """
        k_rope = gather(k_rope, self.y, 2, "attention: shared key")
        k_rope = gather(k_rope, self.x, self.token_dim, "attention: shared key")
        return k_rope if self.shared_dim is None else k_rope.chunk(self.y.size, self.shared_dim)[self.y.rank]
