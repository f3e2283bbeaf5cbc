"""Tensor-parallel layers for models whose code needs the whole residual stream [B, S, H] on every rank of the tensor
axes x and y.

The weights of linear layers are split over x and y as in fourfold's own decoder. Between these layers, every rank of x
and y repeats the same work (residual, norms). So the model's code need not know about the grid. If several ranks have
the same tensor, each of them also gets the full gradient of this tensor.
"""

import weakref

from torch import Tensor, nn

from fourfold.errors import UserError
from fourfold.parallel.grid.communicate import share, sum_gradient, sum_of, whole
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.other_models.conv1d import InputFirst, bias_tile, output_first, weight_tile
from fourfold.parallel.tensor.embedding import Embedding
from fourfold.parallel.tensor.linear import Linear4D, OverY, linear_4d
from fourfold.parallel.tensor.sharding import Tile


class Entrance:
    """Takes this y rank's channels from the residual stream, [B, S, H] → [B, S, H/y] or [N, H] → [1, N, H/y].

    Layers that read the same tensor one after another, such as q, k, and v, share one entrance. So one collective sums
    the gradients of their inputs over x.
    """

    def __init__(self, grid: Grid, name: str) -> None:
        self.x, self.y, self.name = grid.x, grid.y, name
        self._last: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def __call__(self, x_BSH: Tensor) -> Tensor:
        if x_BSH.dim() not in (2, 3):
            raise UserError(
                f"{self.name} reads a tensor of shape {list(x_BSH.shape)}; only [batch, sequence, hidden] and [tokens, "
                "hidden] can be split"
            )
        if self._last is not None:
            read, made = (reference() for reference in self._last)
            if read is x_BSH and made is not None:
                return made
        x_BSh = share(_as_sequences(x_BSH), self.y, 2, f"{self.name}: channels")
        x_BSh = sum_gradient(x_BSh, self.x, f"{self.name}: input gradient")
        if x_BSh is not x_BSH:
            self._last = (weakref.ref(x_BSH), weakref.ref(x_BSh))
        return x_BSh


def _as_sequences(x: Tensor) -> Tensor:
    return x[None] if x.dim() == 2 else x


def _as_before(out_BSD: Tensor, read: Tensor) -> Tensor:
    """Give a layer's output as many dims as its input has. If this removes a dim, copy the output, because FSDP2 cannot
    track a view of the output."""
    return out_BSD[0].clone() if read.dim() == 2 else out_BSD


def leave(partial_BSh: Tensor, grid: Grid, name: str) -> Tensor:
    """Sum partial outputs over x, and gather the channels of all y ranks."""
    return whole(sum_of(partial_BSh, grid.x, f"{name}: outputs"), grid.y, 2, f"{name}: channels")


class WholeTokensLinear(Linear4D):
    """A tensor-parallel linear layer whose input has all tokens on every x rank. So it does not gather over x."""

    gathers_tokens = False

    def __init__(self, linear: nn.Linear, grid: Grid, over_y: OverY, name: str, transposed: bool) -> None:
        super().__init__(linear, grid, over_y, name, transposed=transposed)
        self.is_input_first = isinstance(linear, InputFirst)
        self.shares = grid.y.size if over_y == "features" else 1
        self.grid, self.in_features, self.out_features = grid, linear.in_features, linear.out_features

    def add_weights(self, linear: nn.Linear, tile: Tile, over_out: Tile, grid: Grid) -> None:
        if isinstance(linear, InputFirst):
            tile, over_out = weight_tile(tile, linear.parts), bias_tile(over_out, linear.parts)
        super().add_weights(linear, tile, over_out, grid)

    def matrices(self) -> tuple[Tensor, ...]:
        return (output_first(self.weight, self.shares),) if self.is_input_first else super().matrices()

    def add_bias(self, out: Tensor) -> Tensor:
        return out if self.bias is None else out + self.bias.flatten()


class ColumnLinear(WholeTokensLinear):
    """A linear layer with weight [out/x, in/y] that reads the whole residual stream.

    Its output features are split over x, and also over y if ``over_y`` is "features". With ``gather_output``, every
    rank gets all features.
    """

    def __init__(
        self, linear: nn.Linear, grid: Grid, over_y: OverY, entry: Entrance, gather_output: bool, name: str
    ) -> None:
        super().__init__(linear, grid, over_y, name, transposed=False)
        self.entry, self.gather_output = entry, gather_output

    def forward(self, x_BSH: Tensor) -> Tensor:
        out = super().forward(self.entry(x_BSH))
        out = whole(out, self.grid.x, 2, f"{self.name}: features") if self.gather_output else out
        return _as_before(out, x_BSH)


class RowLinear(WholeTokensLinear):
    """A linear layer with weight [out/y, in/x] that reads split features and writes the whole residual stream.

    Its input is split like the output of ``ColumnLinear``. With ``split_input``, the input has all features on every
    rank, and the layer takes this x rank's share.
    """

    def __init__(self, linear: nn.Linear, grid: Grid, over_y: OverY, split_input: bool, name: str) -> None:
        super().__init__(linear, grid, over_y, name, transposed=True)
        self.split_input = split_input

    def transposed_bias(self) -> Tile:
        return Tile()

    def forward(self, a: Tensor) -> Tensor:
        a_BSD = _as_sequences(a)
        if self.split_input:
            a_BSD = share(a_BSD, self.grid.x, 2, f"{self.name}: features")
        (out_BSh,) = linear_4d(a_BSD, [self])
        return _as_before(self.add_bias(leave(out_BSh, self.grid, self.name)), a)


class WholeEmbedding(Embedding):
    """Maps indices [B, S] to embeddings [B, S, H], and multiplies them by ``embed_scale`` if it is given."""

    def __init__(self, embedding: nn.Embedding, grid: Grid, name: str, embed_scale: Tensor | float | None) -> None:
        super().__init__(embedding, grid, name)
        if isinstance(embed_scale, Tensor):
            self.register_buffer("embed_scale", embed_scale, persistent=False)
        else:
            self.embed_scale = embed_scale
        self.grid, self.padding_idx = grid, embedding.padding_idx
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim

    def forward(self, indices_BS: Tensor) -> Tensor:
        rows_BSh = self.look_up(indices_BS)
        # As in torch, the padding token's row gets no gradient.
        if self.padding_idx is not None:
            is_padding_BS1 = (indices_BS == self.padding_idx)[..., None]
            rows_BSh = rows_BSh.detach().where(is_padding_BS1, rows_BSh)
        out_BSH = leave(rows_BSh, self.grid, self.name)
        if self.embed_scale is None:
            return out_BSH
        scale = self.embed_scale
        return out_BSH * (scale.to(self.weight.dtype) if isinstance(scale, Tensor) else scale)
