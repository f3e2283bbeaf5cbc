"""Map every parameter of the decoder to the tensors in a Hugging Face model's files, with the tables of
``file_formats``."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.huggingface.file_formats import FORMATS, HEAD, VOCABULARY, Format, Table
from fourfold.models.transformer import parameter_shapes


@dataclass(frozen=True)
class TensorPiece:
    """The rows of a Hugging Face tensor that belong to one of the decoder's parameters. There are ``rows`` such rows,
    in ``groups`` groups of equal size.

    The first group begins at row ``first`` of the tensor, and each following group begins ``stride`` rows later. If the
    decoder's parameter has more than ``rows`` rows, its last rows are padding.
    """

    name: str
    first: int
    rows: int
    groups: int
    stride: int
    expert: int | None = None
    """The index of the expert whose rows these are. None if the decoder's parameter does not stack experts, or if the
    Hugging Face tensor stacks them too."""
    paired_rows: int = 0
    """Number of rows at the beginning of each group whose order differs. The decoder's parameter first has the rows 0,
    2, 4, … of the Hugging Face tensor's group, and then the rows 1, 3, 5, …."""

    def of(self, parameter: Tensor) -> Tensor:
        """Return the full parameter, or only the piece's expert if the parameter stacks experts."""
        return parameter if self.expert is None else parameter[self.expert]

    def runs(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Divide ``rows`` of the decoder's parameter into runs whose rows are evenly spaced in the Hugging Face tensor.

        Yield two slices for each run. The first has the run's rows, relative to the start of ``rows``. The second has
        the same rows in the Hugging Face tensor. The step of the second slice is above 1 if the rows are interleaved.
        """
        size, pairs = self.rows // self.groups, self.paired_rows
        if size == 1:
            first, last = (self.first + row * self.stride for row in (rows.start, rows.stop - 1))
            yield slice(0, rows.stop - rows.start), slice(first, last + 1, self.stride)
            return
        for group in range(rows.start // size, math.ceil(rows.stop / size)):
            ours, theirs = group * size, self.first + group * self.stride
            for part in (range(0, pairs, 2), range(1, pairs, 2), range(pairs, size)):
                begin, end = max(rows.start, ours), min(rows.stop, ours + len(part))
                if begin < end:
                    here, there = slice(begin - rows.start, end - rows.start), part[begin - ours : end - ours]
                    yield here, slice(theirs + there[0], theirs + there[-1] + 1, there.step)
                ours += len(part)

    def grouped(self, ours: Tensor) -> Tensor:
        """Split the rows of the decoder's parameter into groups, [groups, rows of a group, …]. The rows of each group
        are in the order of the Hugging Face tensor."""
        whole: Tensor = ours[: self.rows].unflatten(0, (self.groups, -1))
        if not self.paired_rows:
            return whole
        rotated, rest = whole[:, : self.paired_rows], whole[:, self.paired_rows :]
        return torch.cat([rotated.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2), rest], dim=1)


@dataclass(frozen=True)
class TheirTensor:
    """A tensor of a Hugging Face model, and the decoder's parameters that it joins."""

    name: str
    shape: tuple[int, ...]
    transposed: bool
    """Whether the tensor is stored as [in, out]. The decoder's parameters are [out, in]."""
    is_stacked: bool
    """Whether the tensor and the decoder's parameters stack all experts. If they do, ``pieces`` describes the rows of
    one expert."""
    is_convolution: bool
    """Whether the tensor has a dim of size 1 after the first dim."""
    pieces: tuple[TensorPiece, ...]

    def joined(self, ours: Sequence[Tensor]) -> Tensor:
        """Join the pieces into the Hugging Face tensor: drop the padding, stack the rows, and transpose if that
        tensor is stored as [in, out]."""
        if self.is_stacked:
            return torch.stack([self._joined(of_expert) for of_expert in zip(*ours, strict=True)])
        return self._joined(ours)

    def _joined(self, ours: Sequence[Tensor]) -> Tensor:
        groups = [piece.grouped(tensor) for piece, tensor in zip(self.pieces, ours, strict=True)]
        whole = (groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)).flatten(0, 1)
        if self.is_convolution:
            return whole[:, None]
        return whole.T.contiguous() if self.transposed else whole


def head_of(kind: str) -> str:
    """Return the Hugging Face name of the LM head."""
    return next(theirs for theirs, ours in FORMATS[kind].table.items() if ours == (HEAD,))


def name_map(kind: str, model: ModelConfig, files: Format | None = None) -> list[TheirTensor]:
    """Return the tensors of a Hugging Face model, layer by layer.

    Args:
        kind: The family, as the ``model_type`` in config.json.
        model: The model.
        files: The format of the files. The default is the format that transformers writes.
    """
    files = files or FORMATS[kind]
    shapes = parameter_shapes(model)
    found: list[TheirTensor] = []
    # Tables list the query projection under two names. Skip the name that this model does not use.
    other = ".q_proj." if model.q_lora_rank else ".q_b_proj."
    for theirs, ours, expert in _rows(files.table, model):
        if ours[0] in shapes and other not in theirs:
            found.append(_their_tensor(files, theirs, ours, expert, shapes, model))
    placed = [(piece.name, piece.expert) for tensor in found for piece in tensor.pieces]
    assert len(placed) == len(set(placed)), f"two places in {kind} for one parameter"
    missing = set(shapes) ^ {name for name, _ in placed}
    assert not missing, f"no place in {kind}: {missing}"
    return found


def _rows(table: Table, model: ModelConfig) -> Iterator[tuple[str, tuple[str, ...], int | None]]:
    """Yield a table's rows for every layer and expert: the Hugging Face name, the decoder's names, and the expert's
    index (or None)."""
    yield from ((theirs, ours, None) for theirs, ours in table.items() if "{i}" not in theirs)
    layered = [row for row in table.items() if "{i}" in row[0]]
    for i in range(model.num_hidden_layers):
        other = ".self_attn." if model.type_of(i) == "linear_attention" else ".linear_attn."
        for theirs, ours in layered:
            if other in theirs:
                continue
            names = tuple(name.format(i=i) for name in ours)
            if "{e}" in theirs:
                yield from ((theirs.format(i=i, e=e), names, e) for e in range(model.num_experts))
            else:
                yield theirs.format(i=i), names, None


def _their_tensor(
    files: Format,
    theirs: str,
    ours: tuple[str, ...],
    expert: int | None,
    shapes: dict[str, tuple[int, ...]],
    model: ModelConfig,
) -> TheirTensor:
    is_stacked = any(part in theirs for part in files.stacked)
    dims = [shapes[name][1:] if is_stacked or expert is not None else shapes[name] for name in ours]
    rows = [model.vocab_size if name in VOCABULARY else shape[0] for name, shape in zip(ours, dims, strict=True)]
    pairs = [model.rotary_dim * any(part in name for part in files.rotated_in_pairs) for name in ours]
    groups = max(1, min(rows) // model.head_dim) if any(pairs) else 1
    heads = [key for part, key in files.by_head.items() if part in theirs]
    if heads:
        groups = getattr(model, heads[0])
    if any(part in theirs for part in files.by_row):
        groups = min(rows)
    stride = sum(rows) // groups
    firsts = [sum(rows[:i]) // groups for i in range(len(rows))]
    pieces = [
        TensorPiece(name, first, n, groups, stride, expert, paired)
        for name, first, n, paired in zip(ours, firsts, rows, pairs, strict=True)
    ]
    shape = (sum(rows), *dims[0][1:])
    transposed = len(shape) == 2 and any(part in theirs for part in files.transposed)
    shape = shape[::-1] if transposed else shape
    is_convolution = any(part in theirs for part in files.convolutions)
    if is_convolution:
        shape = (shape[0], 1, *shape[1:])
    experts = shapes[ours[0]][:1] if is_stacked else ()
    return TheirTensor(theirs, experts + shape, transposed, is_stacked, is_convolution, tuple(pieces))
