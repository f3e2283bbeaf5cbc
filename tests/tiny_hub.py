"""Make a small dataset in the Hub's format: a folder of Parquet files."""

from __future__ import annotations

import random
from pathlib import Path

from tiny_corpus import WORDS

FILES = 4


def make_dataset(folder: Path, documents: int = 40) -> str:
    """Write documents to four files, and five more documents to a split `validation`. Return the dataset's name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    names = [*(f"train-{number}-of-{FILES}" for number in range(FILES)), "validation-0-of-1"]
    for name in names:
        chance = random.Random(name)
        count = documents // FILES if name.startswith("train") else 5
        texts = [" ".join(chance.choices(WORDS, k=chance.randint(5, 40))) for _ in range(count)]
        texts[1] = ""  # a row without text is no document
        table = pa.table({"number": list(range(count)), "text": texts})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=7)
    return f"hf:{folder}"


def texts_of(dataset: str) -> list[str]:
    """Return the documents of the split `train`, in order."""
    import pyarrow.parquet as pq

    files = sorted(Path(dataset.removeprefix("hf:")).glob("train-*.parquet"))
    return [text for file in files for text in pq.read_table(file)["text"].to_pylist() if text]
