"""Linear attention on the grid. Each rank computes its own heads, or its own sequences."""

from torch import Tensor

from fourfold.config.layout import AttentionSplit
from fourfold.models.causal_attention import AttentionContext
from fourfold.models.delta_net import DeltaCore
from fourfold.models.norms import RMSNorm
from fourfold.models.recomputation import recomputable
from fourfold.parallel.attention.attention import OVER_Y, rank_after_rank, whole_sequences
from fourfold.parallel.attention.context import context_of_sequences, gather_sequence, scatter_sequence
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.linear import NORMAL_BIAS
from fourfold.parallel.tensor.norm import HeadNorm
from fourfold.parallel.tensor.sharding import Tiled


class SharedDeltaCore(DeltaCore, Tiled):
    """Compute linear attention for this rank's share of the heads or sequences.

    With ``split`` "heads", the ranks of the tensor axis y split the heads. With "batch", they split the sequences. The
    state of a head depends on all earlier tokens. So the ranks of the context axis cp always use Ulysses' all-to-alls,
    which give each rank all tokens of some heads.
    """

    def __init__(self, core: DeltaCore, grid: Grid, split: AttentionSplit) -> None:
        super().__init__(core.config)
        assert split != "sequence", "a rank runs whole sequences"
        for name in self.CHANNELS:
            self.add_tile(name, core.get_parameter(name), NORMAL_BIAS[OVER_Y[split]], grid)
        assert isinstance(core.norm, RMSNorm)
        self.norm = HeadNorm(core.norm, grid)
        self.split, self.x, self.y, self.cp = split, grid.x, grid.y, grid.cp

    @recomputable
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, z: Tensor, b: Tensor, a: Tensor, context: AttentionContext
    ) -> Tensor:
        if self.split == "batch":
            mine = slice(self.y.rank * len(q), (self.y.rank + 1) * len(q))
            return self.compute(q, k, v, z, b, a, context_of_sequences(context, mine))
        q, k, v, z, b, a = (whole_sequences(t, self.x.size) for t in (q, k, v, z, b, a))
        return rank_after_rank(self.compute(q, k, v, z, b, a, context), self.x.size)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, context: AttentionContext, *parameters: Tensor
    ) -> Tensor:
        """Run ``DeltaCore.mix`` on whole sequences, with this cp rank's share of the heads."""
        q, k, v, b, a = gather_sequence(self.cp, q, k, v, b, a)
        mine = (parameter.chunk(self.cp.size)[self.cp.rank] for parameter in parameters)
        return scatter_sequence(super().mix(q, k, v, b, a, context, *mine), self.cp)
