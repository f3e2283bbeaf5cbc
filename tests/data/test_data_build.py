"""The path from a run file's sources to samples, and the built-in corpus."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from fourfold.data.indexed import IndexedDataset
from fourfold.data.manifest import validation_prefix
from fourfold.data.prepare import prepare
from fourfold.data.run_data import build_dataset, ensure_builtin
from fourfold.data.sources import InputFile
from fourfold.errors import UserError


def small_library(_: object) -> list[InputFile]:
    """Return a few small documents instead of the standard library, which would take seconds to tokenize."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [InputFile(str(path), path.stat().st_size, 0) for path in files] * 20


def ensure(cache: Path) -> str:
    """Build the corpus. Several processes call this at once."""
    import fourfold.data.prepare

    fourfold.data.prepare.list_inputs = small_library
    # Tokenize without processes, because a worker of a pool cannot have children.
    fourfold.data.prepare.available_cores = lambda: 1
    return ensure_builtin("bytes", cache)


def test_builtin_by_several_processes_at_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        [prefix] = set(pool.map(ensure, [tmp_path] * 3, chunksize=1))
    train, held_out = IndexedDataset(prefix), IndexedDataset(validation_prefix(prefix))
    assert train.documents > held_out.documents > 0
    stem = Path(prefix).name
    expected = {f"{stem}{end}" for end in (".bin", ".idx", ".json", ".lock")}
    expected |= {f"{stem}-validation{end}" for end in (".bin", ".idx", ".json")}
    assert {path.name for path in tmp_path.iterdir()} == expected


def test_builtin_trains_a_tokenizer_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fourfold.data.prepare.list_inputs", small_library)
    monkeypatch.setattr("fourfold.data.prepare.available_cores", lambda: 1)
    prefix = ensure_builtin(cache_dir=tmp_path / "cache", vocab_size=300)
    assert Path(f"{prefix}-tokenizer.json").is_file()
    monkeypatch.setattr("fourfold.data.run_data.prepare", None)  # preparing again would fail
    assert ensure_builtin(cache_dir=tmp_path / "cache", vocab_size=300) == prefix


def test_build_dataset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 500)
    (tmp_path / "b.txt").write_text("b" * 500)
    for name in "ab":
        prepare([tmp_path / f"{name}.txt"], tmp_path / name, tokenizer="bytes")
    dataset = build_dataset([(tmp_path / "a", 3.0), (str(tmp_path / "b"), 1.0)], seq_length=8, seed=0)
    letters = dataset.read(np.arange(1000)).tokens[:, 0]
    assert abs((letters == ord("a")).sum() - 750) <= 2
    with pytest.raises(UserError, match=r"c\.idx does not exist"):
        build_dataset([(tmp_path / "c", 1.0)], 8, 0)
    prepare([tmp_path / "b.txt"], tmp_path / "b", train_tokenizer_vocab=260)
    with pytest.raises(UserError, match="different tokenizers"):
        build_dataset([(tmp_path / "a", 3.0), (tmp_path / "b", 1.0)], 8, 0)
