"""Datasets of the Hugging Face Hub, or in a folder, by the name that they have here: hf:NAME[:CONFIG][:SPLIT]."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, Self

from fourfold.errors import UserError
from fourfold.extras import import_extra

PREFIX = "hf:"


class HubDataset(NamedTuple):
    """A split of a dataset: of the Hub (``owner/name``), or of a local folder of files that `datasets` reads."""

    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT. Raises UserError for anything else."""
        if "[" in text or "+" in text:
            raise UserError(f"{text}: a part or a sum of splits is not read; name one whole split, such as train")
        parts = text.removeprefix(PREFIX).split(":")
        if not text.startswith(PREFIX) or len(parts) > 3 or not all(parts):
            raise UserError(f"{text} is not of the form hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
        split = parts[-1] if len(parts) > 1 else "train"
        return cls(parts[0], parts[1] if len(parts) == 3 else None, split)

    def __str__(self) -> str:
        return PREFIX + ":".join(part for part in (self.name, self.config, self.split) if part is not None)

    def cached_files(self) -> list[Path]:
        """The Arrow files of the split in the cache of `datasets`, which downloads it where it is not there yet.

        Raises UserError where it cannot be loaded.
        """
        files = [Path(file["filename"]) for file in self._load(streaming=False).cache_files]
        if not files:
            raise UserError(f"{self} has no rows; name another split")
        return files

    def _load(self, streaming: bool) -> Any:
        datasets = import_extra("datasets", "datasets", f"reading {self} needs")
        try:
            return datasets.load_dataset(self.name, self.config, split=self.split, streaming=streaming)
        except Exception as error:  # the library raises its own, the Hub's, the network's and Python's exceptions
            raise UserError(f"{self} cannot be loaded: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
