"""The weights of a Hugging Face model under our names, any slice of any parameter, without the rest of the model."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import family_of, read_config
from fourfold.huggingface.weight_names import (
    BUFFERS,
    HEAD,
    PREFIX,
    Piece,
    TheirTensor,
    head_of,
    name_map,
)
from fourfold.models.tensor_files import TensorFiles
from fourfold.models.transformer import parameter_shapes


class Pretrained:
    """A folder of transformers, opened for a model of the same sizes; no weight is read yet.

    Raises ``UserError`` naming the file and the tensor for a missing file or tensor, a wrong shape, a tensor that the
    model has no place for, and weights that are only there as pickles.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        config = read_config(folder)
        self.kind = family_of(config, str(folder))
        self.files = TensorFiles(folder)
        self.shapes = parameter_shapes(model)
        self.tensors = name_map(self.kind, model)
        self._places: dict[str, tuple[TheirTensor, Piece]] = {}
        self._names: dict[str, str] = {}
        for tensor in self.tensors:
            name = self._name_in_files(tensor.name)
            if name is None:
                raise UserError(f"{folder}: no file has the tensor {tensor.name}")
            if self.files.shapes[name] != tensor.shape:
                raise UserError(
                    f"{self.files.file_of[name]}: the tensor {name} has the shape {list(self.files.shapes[name])}, and "
                    f"the model's sizes make it {list(tensor.shape)}"
                )
            self._names[tensor.name] = name
            for piece in tensor.pieces:
                self._places[piece.name] = (tensor, piece)
        self._check_nothing_left(model)

    def dtype(self, name: str) -> torch.dtype:
        """The type in which a parameter of ours is stored."""
        their_name = self._names[self._places[name][0].name]
        if their_name not in self.files.dtypes:
            raise UserError(f"{self.files.file_of[their_name]}: the tensor {their_name} is no floating-point weight")
        return self.files.dtypes[their_name]

    @torch.no_grad()
    def read_into(self, out: Tensor, name: str, slices: tuple[slice, ...]) -> None:
        """Copy the part ``slices`` of a parameter of ours into ``out``; rows of the vocabulary's padding are zero."""
        tensor, piece = self._places[name]
        rows = slice(min(slices[0].start, piece.rows), min(slices[0].stop, piece.rows))
        count = rows.stop - rows.start
        out[count:].zero_()
        if count == 0 or out.numel() == 0:
            return
        for here, there in piece.runs(rows):
            if tensor.transposed:
                self.files.read_into(out[here].T, self._names[tensor.name], (there, *slices[1:])[::-1])
            else:
                self.files.read_into(out[here], self._names[tensor.name], (there, *slices[1:]))

    def _name_in_files(self, name: str) -> str | None:
        """Files of a model without its head leave out the prefix."""
        short = name.removeprefix(PREFIX.get(self.kind, "model."))
        modules = [HEAD] if name == head_of(self.kind) else []  # transformers 5 calls every head so
        return next((each for each in (name, short, *modules) if each in self.files.shapes), None)

    def _check_nothing_left(self, model: ModelConfig) -> None:
        left = set(self.files.shapes) - set(self._names.values())
        for name in sorted(left):
            if name in (HEAD, head_of(self.kind)) and model.tie_word_embeddings:
                self._check_tied(name)
            elif not name.endswith(BUFFERS):
                raise UserError(
                    f"{self.files.file_of[name]}: a model of type '{self.kind}' and these sizes has no place for the "
                    f"tensor {name}"
                )

    def _check_tied(self, head: str) -> None:
        """A head that is stored although it is the embedding: transformers would use it where it differs.

        The first rows say whether it does.
        """
        embedding = self._names[self._places["embed_tokens.weight"][0].name]
        rows, hidden = self.files.shapes[embedding]
        sample = (slice(0, min(rows, 64)), slice(0, hidden))
        parts = [torch.empty(sample[0].stop, hidden) for _ in range(2)]
        if self.files.shapes[head] == (rows, hidden):
            for part, name in zip(parts, (embedding, head), strict=True):
                self.files.read_into(part, name, sample)
            if torch.equal(*parts):
                return
        raise UserError(
            f"{self.files.file_of[head]}: {head} differs from {embedding}, and config.json has tie_word_embeddings = "
            "true; set it to false there"
        )
