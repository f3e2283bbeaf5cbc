"""Read a Hugging Face model's weights under fourfold's parameter names. Only the requested slice of a parameter is
read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import family_of, read_config
from fourfold.huggingface.file_formats import BUFFERS, FORMATS, HEAD, WITH_STACKED_EXPERTS
from fourfold.huggingface.fp8_blocks import ScaledMatrix, scaled_in
from fourfold.huggingface.mxfp4 import PackedMatrices, packed_in
from fourfold.huggingface.weight_names import TensorPiece, TheirTensor, head_of, name_map
from fourfold.models.tensor_files import TensorFiles, whole_or_part
from fourfold.models.transformer import parameter_shapes


class Pretrained:
    """The weights in a transformers folder, under the names of fourfold's decoder. Opening the folder reads no weights,
    except to compare a tied head with the embedding.

    Raises:
        UserError: A file or tensor is missing, a shape is wrong, the files have a tensor that the model does not use,
            or weights exist only as pickles. The message names the file and the tensor.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        config = read_config(folder)
        self.kind = family_of(config, str(folder))
        self.files = TensorFiles(folder)
        self.shapes = parameter_shapes(model)
        is_stacked = any(name.endswith(".experts.gate_up_proj") for name in self.files.shapes)
        self.tensors = name_map(self.kind, model, WITH_STACKED_EXPERTS.get(self.kind) if is_stacked else None)
        self._places: dict[str, list[tuple[TheirTensor, TensorPiece]]] = {}
        """Maps each of the decoder's parameters to its pieces in the files. A parameter that stacks experts has one
        piece per expert, in order, unless the files stack the experts too."""
        for tensor in self.tensors:
            for piece in tensor.pieces:
                self._places.setdefault(piece.name, []).append((tensor, piece))
        self._packed: dict[str, PackedMatrices | ScaledMatrix] = {}
        """Maps the names of Hugging Face tensors that these files store in MXFP4, or in FP8 with one scale per block,
        to objects that read them."""
        for tensor in self.tensors:
            read = packed_in if tensor.is_stacked else scaled_in
            if packed := read(self.files, self._names_in_files(tensor.name), tensor.shape):
                self._packed[tensor.name] = packed
        whole = [tensor for tensor in self.tensors if tensor.name not in self._packed]
        self._names = {t.name: self.files.find(self._names_in_files(t.name), t.shape) for t in whole}
        """Maps each Hugging Face tensor that is not in ``_packed`` to its name in these files."""
        self._check_nothing_left(model, config)

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a parameter. Tensors in MXFP4 or FP8 count as bf16. Raise ``UserError`` if the
        parameter stacks experts with different dtypes."""
        types = {
            torch.bfloat16 if tensor.name in self._packed else self.files.dtype(self._names[tensor.name])
            for tensor, _ in self._places[name]
        }
        if len(types) > 1:
            raise UserError(
                f"{self.files.folder}: the experts of {name} are stored in several dtypes; convert them to one dtype"
            )
        return types.pop()

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """Read one full parameter, or one expert of a parameter that stacks experts."""
        slices = whole_or_part(self.shapes[name], expert)
        whole = torch.empty([s.stop - s.start for s in slices], dtype=self.dtype(name))
        self.read_into(whole, name, slices)
        return whole if expert is None else whole[0]

    @torch.no_grad()
    def read_into(self, out: Tensor, name: str, slices: tuple[slice, ...]) -> None:
        """Copy a part of a parameter into ``out``. Rows of vocabulary padding are zero.

        Args:
            out: The tensor to fill.
            name: The parameter.
            slices: The part, as one slice per dim of the full parameter.
        """
        places = self._places[name]
        if places[0][0].is_stacked:
            for one, expert in zip(out, range(slices[0].start, slices[0].stop), strict=True):
                self._read_piece(one, *places[0], slices[1:], expert)
        elif places[0][1].expert is None:
            self._read_piece(out, *places[0], slices)
        else:
            for one, (tensor, piece) in zip(out, places[slices[0]], strict=True):
                self._read_piece(one, tensor, piece, slices[1:])

    def _read_piece(
        self,
        out: Tensor,
        tensor: TheirTensor,
        piece: TensorPiece,
        slices: tuple[slice, ...],
        stacked_expert: int | None = None,
    ) -> None:
        rows = slice(min(slices[0].start, piece.rows), min(slices[0].stop, piece.rows))
        count = rows.stop - rows.start
        out[count:].zero_()
        if count == 0 or out.numel() == 0:
            return
        for here, there in piece.runs(rows):
            if tensor.name in self._packed:
                self._packed[tensor.name].read_into(out[here], stacked_expert, there, slices[1])
                continue
            theirs, part = out[here], (there, *slices[1:])
            if tensor.transposed:
                theirs, part = theirs.T, part[::-1]
            if tensor.is_convolution:
                theirs, part = theirs[:, None], (part[0], slice(0, 1), *part[1:])
            if stacked_expert is not None:
                theirs, part = theirs[None], (slice(stacked_expert, stacked_expert + 1), *part)
            self.files.read_into(theirs, self._names[tensor.name], part)

    def _names_in_files(self, name: str) -> list[str]:
        """Return the names that a tensor may have in files. Names lack the prefix if the model was saved without its
        head, and have another prefix if the files also hold a vision model."""
        modules = [HEAD] if name == head_of(self.kind) else []  # transformers 5 uses the name ``HEAD`` in every family.
        beside_images = name.replace("model.", "model.language_model.", 1)
        return [name, name.removeprefix(FORMATS[self.kind].prefix), beside_images, *modules]

    def _check_nothing_left(self, model: ModelConfig, config: Mapping[str, Any]) -> None:
        beyond = FORMATS[self.kind].names_beyond(model.num_hidden_layers, config)
        used = set(self._names.values()).union(*(packed.names for packed in self._packed.values()))
        left = {name for name in set(self.files.shapes) - used if not name.startswith(beyond)}
        for name in sorted(left):
            if name in (HEAD, head_of(self.kind)) and model.tie_word_embeddings:
                self._check_tied(name)
            elif not name.endswith(BUFFERS):
                raise UserError(
                    f"{self.files.file_of[name]}: a model of type '{self.kind}' with these sizes has no place for the "
                    f"tensor {name}"
                )

    def _check_tied(self, head: str) -> None:
        """Refuse a stored head that differs from its tied embedding, because transformers would use the stored head."""
        embedding = self._names[self._places["embed_tokens.weight"][0][0].name]
        if self.files.are_equal(head, embedding):
            return
        raise UserError(
            f"{self.files.file_of[head]}: {head} differs from {embedding}, but config.json has tie_word_embeddings = "
            "true; set tie_word_embeddings = false there"
        )
