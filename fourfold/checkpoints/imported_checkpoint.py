"""Write a checkpoint from weights that were not trained on a grid."""

from collections.abc import Sequence
from pathlib import Path

from fourfold.checkpoints.file_layout import CheckpointTensors, SavedTensor, file_of, write_layout
from fourfold.checkpoints.integrity import seal
from fourfold.checkpoints.saved_state import imported_state, write_state
from fourfold.config.model import ModelConfig
from fourfold.config.run import AXES
from fourfold.models.dtypes import SAFETENSORS_NAMES
from fourfold.models.tensor_files import Entry, split_into_files, write_tensors


def write_weights(folder: Path, model: ModelConfig, entries: Sequence[Entry]) -> dict[str, int]:
    """Write full tensors as a checkpoint, in files of limited size.

    The checkpoint format has one file per rank. So `layout.json` describes the files as if each came from a different
    pipeline rank.

    Args:
        folder: The folder to write to.
        model: The model that the tensors belong to. `state.json` describes it.
        entries: The full tensors, with the names that they get in the checkpoint.

    Returns:
        The size of every tensor file in bytes, by file name.
    """
    files = split_into_files(entries)
    written = {file_of(rank): write_tensors(folder / file_of(rank), tensors) for rank, tensors in enumerate(files)}
    tensors = {
        entry.name: SavedTensor(dtype=SAFETENSORS_NAMES[entry.dtype], shape=entry.shape, pp=rank)
        for rank, file in enumerate(files)
        for entry in file
    }
    sizes = dict.fromkeys(AXES, 1) | {"pp": len(files)}
    write_layout(folder, CheckpointTensors(sizes=sizes, sharded_over=("z",), tensors=tensors))
    write_state(folder, imported_state(model))
    seal(folder, written)
    return {name: file.size for name, file in written.items()}
