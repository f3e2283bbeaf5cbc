"""Check files and folders from untrusted sources before fourfold reads or copies them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from fourfold.errors import UserError
from fourfold.parsing import parse_json

READ_SUFFIXES = (".json", ".safetensors", ".model", ".txt", ".jinja", ".tiktoken")
"""Suffixes of files that fourfold or transformers may read from a model's folder."""


ADAPTER_CONFIG = "adapter_config.json"
"""Name of the file that marks a folder as a peft adapter."""


def check_no_adapter(folder: Path) -> None:
    """Check that a folder is not a peft adapter, because an adapter alone is not a model.

    Raises:
        UserError: The folder is an adapter, or its adapter_config.json is damaged.
    """
    file = folder / ADAPTER_CONFIG
    if not file.is_file():
        return
    try:
        base = parse_json(file.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{file} is not the configuration of an adapter: {error}") from None
    raise UserError(
        f"{folder} is a peft adapter{f' for the model {base}' if base else ''}, not a model; merge it into its "
        "model (peft: merge_and_unload, then save_pretrained), and name the merged folder"
    )


def check_regular(file: Path) -> Path:
    """Return the path if it is a regular file or does not exist. (Opening a named pipe could wait forever.)

    Raises:
        OSError: The path is a folder, a named pipe, or a device.
    """
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "it is not a file, but a folder, a named pipe or a device")
    return file


def read_text_file(path: Path, what: str, instead: str) -> str:
    """Return the text of a file that the user named.

    Args:
        path: The file.
        what: The option or key that named the file. The error message begins with it.
        instead: What would work, such as "give a TOML file". The error message ends with it.

    Raises:
        UserError: The path is not a file, cannot be read, or is not UTF-8.
    """
    try:
        return check_regular(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{what} {path} cannot be read: {error.strerror}; {instead}".lstrip()) from None
    except UnicodeDecodeError as error:
        problem = f"{what} {path} is not text in UTF-8 (byte {error.start})".lstrip()
        raise UserError(f"{problem}; convert it with iconv, or {instead}") from None


def check_model_folder(folder: Path) -> None:
    """In a model's folder, check every file that fourfold or transformers may read.

    A link may lead to a file in the folder. In the Hub's cache, a link may also lead to the `blobs` folder of the
    same repository.

    Raises:
        UserError: A link leads to any other place (an export would publish the target of the link). Or a file is not a
            regular file or cannot be read, or an index names files in other folders.
    """
    root = Path(os.path.realpath(folder))
    allowed = [root, *(place.parent / "blobs" for place in (root, *root.parents) if place.name == "snapshots")]
    file = folder
    try:
        for file in sorted(folder.iterdir()):
            if not file.name.endswith(READ_SUFFIXES):
                continue
            target = Path(os.path.realpath(file))
            if not any(target.is_relative_to(place) for place in allowed):
                raise UserError(
                    f"{file} is a link to {target}, outside the model's folder; replace the link with the file"
                )
            check_regular(file)
            if file.name.endswith(".index.json"):
                _check_index(file)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}; make it readable, or give another folder") from None


def _check_index(index: Path) -> None:
    """Raise ``UserError`` if a tensor index (``*.index.json``) names a file outside the folder of the index."""
    try:
        listed = dict(parse_json(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError):
        # Ignore a damaged index here, because the code that loads the tensors reports it.
        return
    for tensor, file in listed.items():
        if not isinstance(file, str) or file in ("", "..") or Path(file).name != file or "\0" in file:
            raise UserError(f"{index} has {tensor} in {file!r}, which is not the name of a file in the same folder")
