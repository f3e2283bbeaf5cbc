"""An embedding whose table is split over the tensor axes, [vocab/x, hidden/y].

Each rank looks up the rows that it holds, and uses zeros for all other rows. A reduce-scatter over x sums the results
of the ranks. After that, each rank has the embeddings of its own share of the sequence.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.parallel.grid.communicate import scatter_sum
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.tensor.sharding import Tile, Tiled


class Embedding(Tiled):
    """Maps indices [B, S] to embeddings [B, S/x, H/y], for tokens and for learned positions."""

    weight: nn.Parameter

    def __init__(self, embedding: nn.Embedding, grid: Grid, name: str) -> None:
        super().__init__()
        self.x, self.name = grid.x, name
        self.add_tile("weight", embedding.weight, Tile(x=0, y=1), grid)

    def forward(self, indices_BS: Tensor) -> Tensor:
        return scatter_sum(self.look_up(indices_BS), self.x, 1, f"{self.name}: rows")

    def look_up(self, indices_BS: Tensor) -> Tensor:
        """Return embeddings [B, S, H/y], with zeros for indices whose rows are on other ranks."""
        rows = self.weight.shape[0]
        local_BS = indices_BS - self.x.rank * rows
        elsewhere_BS = (local_BS < 0) | (local_BS >= rows)
        partial_BSh = F.embedding(local_BS.masked_fill(elsewhere_BS, 0), self.weight)
        return partial_BSh.masked_fill(elsewhere_BS[..., None], 0)
