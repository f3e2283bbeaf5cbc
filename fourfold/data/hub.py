"""Datasets of the Hugging Face Hub, or in a folder, by the name that they have here: hf:NAME[:CONFIG][:SPLIT]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    def streams(self, count: int, text_key: str) -> Sequence[HubStream]:
        """The split as so many streams, each of its own files, without downloading it first.

        Raises UserError where it cannot be loaded, or has fewer files.
        """
        dataset = self._load(streaming=True)
        if count > dataset.num_shards:
            raise UserError(f"{self} has {dataset.num_shards} files, so data.streams is at most that, not {count}")
        return [HubStream(str(self), dataset, count, index, text_key) for index in range(count)]

    def _load(self, streaming: bool) -> Any:
        datasets = import_extra("datasets", "datasets", f"reading {self} needs")
        try:
            return datasets.load_dataset(self.name, self.config, split=self.split, streaming=streaming)
        except Exception as error:  # the library raises its own, the Hub's, the network's and Python's exceptions
            raise UserError(f"{self} cannot be loaded: {_one_line(error)}") from error


class HubStream:
    """Documents of one part of a streamed dataset, in the dataset's order; after the last comes the first again."""

    def __init__(self, name: str, dataset: Any, count: int, index: int, text_key: str) -> None:
        self._name, self._dataset, self._part, self._text_key = name, dataset, (count, index), text_key

    def read(self, place: Any) -> Iterator[tuple[Any, str]]:
        """Yield each document after its place; None is the place of the first. Raises UserError for what is no text."""
        epoch, state = (0, None) if place is None else (place["epoch"], place["state"])
        while True:
            part = self._dataset.shard(*self._part)
            any_text = state is not None
            if state is None:
                state = part.state_dict()
            else:
                part.load_state_dict(state)  # which `state_dict` heeds from the next row on only
            rows = iter(part)
            for row in rows:
                if text := self._text(row):
                    any_text = True
                    yield {"epoch": epoch, "state": state}, text
                state = part.state_dict()
            if not any_text:
                raise UserError(f"{self._name} has no text under '{self._text_key}'")
            epoch, state = epoch + 1, None

    def _text(self, row: dict[str, Any]) -> str | None:
        if self._text_key not in row:
            raise UserError(
                f"{self._name} has no '{self._text_key}' among {', '.join(row)}; name the text in data.text_key"
            )
        text = row[self._text_key]
        if text is not None and not isinstance(text, str):
            raise UserError(f"{self._name}: '{self._text_key}' is no text but {type(text).__name__}; set data.text_key")
        return text


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
