"""Read datasets from the Hugging Face Hub or from a local folder, named hf:NAME[:CONFIG][:SPLIT]."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from fourfold.errors import UserError
from fourfold.extras import import_extra

PREFIX = "hf:"


class HubStream:
    """The documents of part `index` of a streamed dataset, in the dataset's order, repeated endlessly. The dataset is
    divided into `count` parts."""

    def __init__(self, name: str, dataset: Any, count: int, index: int, text_key: str) -> None:
        self._name, self._dataset, self._part, self._text_key = name, dataset, (count, index), text_key

    def read(self, place: Any) -> Iterator[tuple[Any, str]]:
        """Yield each document's place and text. The place says where the document is in the stream, as a JSON value.

        Args:
            place: Place that an earlier call yielded. Reading begins with the document at this place. None begins with
                the first document.

        Raises:
            UserError: A row lacks the text column, a value in this column is not text, or no row has any text.
        """
        epoch, state = (0, None) if place is None else (place["epoch"], place["state"])
        while True:
            part = self._dataset.shard(*self._part)
            any_text = state is not None
            if state is None:
                state = part.state_dict()
            else:
                # Yield `state` itself with the first row, because `part.state_dict()` is not correct until a row has
                # been read.
                part.load_state_dict(state)
            rows = iter(part)
            for row in rows:
                if text := self._text(row):
                    any_text = True
                    yield {"epoch": epoch, "state": state}, text
                state = part.state_dict()
            if not any_text:
                raise UserError(f"{self._name} has no text under '{self._text_key}'; set data.text_key")
            epoch, state = epoch + 1, None

    def _text(self, row: dict[str, Any]) -> str | None:
        """Return the text of a row, or None if the row has none. Raise ``UserError`` if the row lacks the column."""
        if self._text_key not in row:
            raise UserError(
                f"{self._name} has no '{self._text_key}' among {', '.join(row)}; set data.text_key to the text's column"
            )
        text = row[self._text_key]
        if text is not None and not isinstance(text, str):
            raise UserError(f"{self._name}: '{self._text_key}' is {type(text).__name__}, not text; set data.text_key")
        return text


class HubDataset(NamedTuple):
    """One split of a dataset. `name` is a Hub id (owner/name) or a folder of files that `datasets` reads. If
    `config` is None, `datasets` uses the default configuration."""

    name: str
    config: str | None
    split: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse hf:NAME, hf:NAME:SPLIT, or hf:NAME:CONFIG:SPLIT. The default split is "train".

        Raises:
            UserError: The text has another form.
        """
        if "[" in text or "+" in text:
            raise UserError(f"{text}: slices and sums of splits are not supported; name one split, such as train")
        parts = text.removeprefix(PREFIX).split(":")
        if not text.startswith(PREFIX) or len(parts) > 3 or not all(parts):
            raise UserError(f"{text} must have the form hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
        split = parts[-1] if len(parts) > 1 else "train"
        return cls(parts[0], parts[1] if len(parts) == 3 else None, split)

    def __str__(self) -> str:
        return PREFIX + ":".join(part for part in (self.name, self.config, self.split) if part is not None)

    def cached_files(self) -> list[Path]:
        """Return the split's Arrow files in the cache of `datasets`. If the cache lacks the dataset, download it first.

        Raises:
            UserError: The dataset cannot be loaded or has no rows.
        """
        files = [Path(file["filename"]) for file in self._load(streaming=False).cache_files]
        if not files:
            raise UserError(f"{self} has no rows; name another split")
        return files

    def streams(self, count: int, text_key: str) -> Sequence[HubStream]:
        """Divide the split into `count` streams. Each stream reads its own files, and nothing is downloaded in advance.

        Args:
            count: Number of streams.
            text_key: Column of the text.

        Raises:
            UserError: The dataset cannot be loaded or has fewer files than `count`.
        """
        dataset = self._load(streaming=True)
        if count > dataset.num_shards:
            raise UserError(f"{self} has only {dataset.num_shards} files, so data.streams = {count} is too many")
        return [HubStream(str(self), dataset, count, index, text_key) for index in range(count)]

    def _load(self, streaming: bool) -> Any:
        datasets = import_extra("datasets", "datasets", f"reading {self} needs")
        try:
            return datasets.load_dataset(self.name, self.config, split=self.split, streaming=streaming)
        except Exception as error:  # `datasets` passes on any exception of the Hub, the network, and Python.
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(f"{self} cannot be loaded: {reason}") from error
