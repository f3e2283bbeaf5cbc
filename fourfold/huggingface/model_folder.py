"""Handle the folder of a Hugging Face model: its configuration and tokenizer files, and the record of an import or
export."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import CONFIG_FILE
from fourfold.huggingface.weight_names import TheirTensor
from fourfold.parsing import parse_json
from fourfold.untrusted_files import check_model_folder

SOURCE_FOLDER = "huggingface"
"""Name of the folder for the original model's configuration and tokenizer files (``SMALL_FILES``). It is inside an
imported checkpoint, and inside the folder of a run that started from a Hugging Face model."""

TOKENIZER_FILE, GENERATION_FILE = "tokenizer.json", "generation_config.json"
SMALL_FILES = (
    CONFIG_FILE, GENERATION_FILE, TOKENIZER_FILE, "tokenizer_config.json", "tokenizer.model",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
)  # fmt: skip
PATTERNS = (*SMALL_FILES, "*.safetensors", "*.safetensors.index.json")
"""Files to download from the Hub: no pickles and no code."""


@dataclass(frozen=True)
class Transferred:
    """The result of importing or exporting a model."""

    folder: str
    """The folder that was written."""
    kind: str
    """The `model_type` in config.json. For adapters, "LoRA of" and the base model's `model_type`."""
    parameters: int
    """Number of parameters, without vocabulary padding."""
    files: dict[str, int]
    """The size of each weight file in bytes, by name."""
    has_tokenizer: bool = True
    """False if an export found no tokenizer to write."""

    def record(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "folder": self.folder,
            "model_type": self.kind,
            "parameters": self.parameters,
            "bytes": sum(self.files.values()),
            "files": len(self.files),
        }


def keep_small_files(folder: Path, out: Path, names: Sequence[str] = SMALL_FILES) -> None:
    """Copy some files of a Hugging Face model, by default its configuration and tokenizer files.

    Args:
        folder: The model's folder.
        out: The folder to copy to. It is created if it does not exist.
        names: Names of the files (default: ``SMALL_FILES``). Files that the model does not have are skipped.

    Raises:
        UserError: A link leads out of the folder, or a .json file is not valid JSON.
    """
    check_model_folder(folder)
    out.mkdir(exist_ok=True)
    for name in names:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            if name.endswith(".json"):
                try:
                    parse_json(content)
                except ValueError as error:
                    raise UserError(f"{folder / name} is not JSON: {error}; fix the file, or remove it") from None
            (out / name).write_bytes(content)


def source_of(checkpoint: Path) -> Path | None:
    """Return the folder with the original model's ``SMALL_FILES``, or None if there is none. The original model is the
    Hugging Face model that the checkpoint was imported from, or that its run started from."""
    places = (checkpoint / SOURCE_FOLDER, checkpoint.resolve().parent.parent / SOURCE_FOLDER)
    found = next((place for place in places if (place / CONFIG_FILE).exists()), None)
    if found is not None:
        check_model_folder(found)
    return found


def count_parameters(tensors: Sequence[TheirTensor]) -> int:
    """Return the total number of parameters in these tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors)
