"""Prepare a corpus on disk from text. An interrupted preparation keeps its finished parts, and the corpus appears only
when it is complete."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fourfold.data.atomic_files import locked, writing
from fourfold.data.canaries import Canaries, ledger_path, plant
from fourfold.data.indexed import IndexedDataset, bin_path, idx_path
from fourfold.data.manifest import (
    CorpusSplit,
    Manifest,
    manifest_path,
    read_manifest,
    validation_prefix,
    write_manifests,
)
from fourfold.data.order import falls_within
from fourfold.data.progress import show_progress
from fourfold.data.shards import cut_into_shards, digest, merge, tokenize_all
from fourfold.data.sources import InputFile, list_inputs, list_left_out, read_documents
from fourfold.data.tokenizer import HFTokenizer, Tokenizer, load_tokenizer, train_bpe
from fourfold.errors import UserError, given_as
from fourfold.processes import available_cores

# Maximum number of bytes to train a tokenizer on. With more bytes, training takes hours, but the tokenizer barely
# changes.
_TRAINING_BYTES = 1 << 30
_TRAINING_SAMPLE_SEED = 0
_MOST_NAMED = 10

Ends = tuple[str | None, str | None]
"""The options eos_token and bos_token of `prepare`."""


@dataclass(frozen=True)
class PrepareSummary:
    """The result of preparing a corpus."""

    train: Manifest
    validation: Manifest | None
    files: list[Path]
    """All files of the corpus."""
    seconds: float
    reused: bool
    """Whether an earlier call had already made the corpus, so that nothing was written."""
    notes: tuple[str, ...] = ()
    """Notes for the user about how the input was read, such as which files were skipped."""


@dataclass(frozen=True)
class _Request:
    """Everything that determines the content of a corpus."""

    inputs: list[str]
    files: list[InputFile]
    text_key: str
    tokenizer: str
    """Fingerprint of the tokenizer, or a description of the tokenizer to train."""
    validation_fraction: float
    seed: int
    canaries: Canaries | None

    def digest(self) -> str:
        planted = [] if self.canaries is None else [asdict(self.canaries)]
        return digest([self.tokens_digest(), self.validation_fraction, self.seed, *planted])

    def tokens_digest(self) -> str:
        files = [[file.path, file.size, file.mtime_ns] for file in self.files]
        return digest([files, self.text_key, self.tokenizer])


def prepare(
    inputs: Iterable[str | Path],
    output_prefix: str | Path,
    *,
    tokenizer: str | Path | None = None,
    train_tokenizer_vocab: int | None = None,
    workers: int | None = None,
    eos_token: str | None = None,
    bos_token: str | None = None,
    text_key: str = "text",
    validation_fraction: float = 0.0,
    seed: int = 0,
    canaries: Canaries | None = None,
    force: bool = False,
) -> PrepareSummary:
    """Tokenize `inputs` into OUT.bin, OUT.idx, and OUT.json.

    An end-of-document token follows each document.

    If a preparation was interrupted, the next call continues from the folder OUT.parts. If OUT already has a corpus
    that was made in the same way from the same files, the function keeps it. With `force`, the function starts from
    the beginning in both cases. The function replaces any other corpus at OUT. It writes OUT.json last, so a corpus
    with this file is complete.

    Args:
        inputs: Files, folders, globs, "python-stdlib", or "hf:NAME[:CONFIG][:SPLIT]" (see `list_inputs`).
        output_prefix: OUT, the common beginning of the paths of all files to write.
        tokenizer: "bytes", or the path of a tokenizer.json or its folder. The file is copied to OUT-tokenizer.json.
        train_tokenizer_vocab: Instead of using `tokenizer`, train a tokenizer of this size on the input, and save it as
            OUT-tokenizer.json.
        workers: Maximum number of processes (default: one per core). The result does not depend on this number.
        eos_token: Special token that ends every document (default: the tokenizer's own, see `HFTokenizer`).
        bos_token: Special token that begins every document, or "auto" for the tokenizer's own (default: none).
        text_key: Key or column of the text. You can give several keys, separated by commas. Each row uses the first of
            these keys that it has.
        validation_fraction: Fraction of the documents that are written to the corpus OUT-validation instead. A seeded
            hash chooses them.
        seed: Seed of the hash.
        canaries: Documents to plant in the training split, each a known number of times (0 for the control documents).
            OUT-canaries.jsonl lists all these documents.
        force: Whether to create the corpus again even if it exists.

    Returns:
        The manifests and the files of the corpus, and notes about how the input was read.

    Raises:
        UserError: The input or the options cannot work, another process is preparing the corpus, or a file cannot be
            written. The message names the file, and the line if there is one.
    """
    began, prefix, ends = time.monotonic(), Path(output_prefix), (eos_token, bos_token)
    if (tokenizer is None) == (train_tokenizer_vocab is None):
        raise UserError(
            "choose one tokenizer: --tokenizer bytes, --tokenizer PATH of a tokenizer.json, or --train-tokenizer VOCAB"
        )
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}; it must be at least 1")
    check_fraction(validation_fraction)
    identity = _check_tokens(tokenizer, train_tokenizer_vocab, canaries, ends)
    names = [str(item) for item in inputs]
    request = _Request(names, list_inputs(names), text_key, identity, validation_fraction, seed, canaries)
    wanted = train_tokenizer_vocab if tokenizer is None else tokenizer
    assert wanted is not None, "refused above"
    finished = None if force else _find_finished(prefix, request)
    train, validation = finished or _make(request, prefix, wanted, ends, workers or available_cores(), force)
    files, notes = _list_files(prefix, train, validation, canaries), (*train.notes, *collect_notes(names, None))
    return PrepareSummary(train, validation, files, time.monotonic() - began, finished is not None, notes)


def _make(
    request: _Request, prefix: Path, tokenizer: str | Path | int, ends: Ends, workers: int, force: bool
) -> tuple[Manifest, Manifest | None]:
    """Create the corpus. If `tokenizer` is a number, first train a tokenizer of that size. Return the manifests of the
    train split and of the validation split (or None)."""
    with unfinished(prefix) as parts:
        if force:
            _remove_all_but(parts, set())
        trained = parts / f"tokenizer-{request.tokens_digest()}.json"
        if isinstance(tokenizer, int) and not trained.is_file():
            _train(request, tokenizer, trained)
        name = str(trained if isinstance(tokenizer, int) else tokenizer)
        loaded = load_tokenizer(name, *ends)
        shards = cut_into_shards(request.files, request.text_key, name, loaded)
        _remove_all_but(parts, {trained.stem} | {shard.key for shard in shards})
        tokenize_all(shards, parts, workers)
        splits = merge(shards, parts, loaded.vocab_size, request.validation_fraction, request.seed)
        _check_filled(splits, request)
        if request.canaries is not None:
            try:
                ledger = ledger_path(prefix)
                splits["train"] = plant(splits["train"], request.canaries, loaded, request.text_key, ledger)
            except UserError as error:
                raise UserError(f"{error}; the tokenized text stays in {parts} for the next attempt") from None
        else:
            ledger_path(prefix).unlink(missing_ok=True)  # An earlier corpus may have left a ledger behind.
        made = _publish(splits, prefix, request, loaded, collect_notes([], loaded))
        _remove_all_but(parts, set())
    return made


def _check_tokens(tokenizer: str | Path | None, train_vocab: int | None, canaries: Canaries | None, ends: Ends) -> str:
    """Check the options of the tokenizer and the canaries. Return the tokenizer's fingerprint, or a description of the
    tokenizer to train."""
    if canaries is not None:
        canaries.check()
        if ends[1] is not None:
            raise UserError(
                "--bos-token and --canaries cannot be combined, because canaries are plain text; leave one out"
            )
    if tokenizer is not None:
        with given_as("--tokenizer"):
            return load_tokenizer(tokenizer, *ends).fingerprint
    if ends != (None, None):
        raise UserError(
            "--eos-token and --bos-token need --tokenizer; a trained tokenizer ends documents with <|endoftext|>"
        )
    return f"train {train_vocab}"


def collect_notes(inputs: list[str], tokenizer: Tokenizer | None) -> list[str]:
    """Return notes for the user about skipped files, and about documents without the usual beginning-of-text token."""
    notes = []
    for why, paths in list_left_out(inputs).items():
        more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
        notes.append(f"left out, {why}: {', '.join(map(str, paths[:_MOST_NAMED]))}{more}")
    if isinstance(tokenizer, HFTokenizer) and tokenizer.usually_begins and not tokenizer.begins_documents:
        notes.append("documents do not begin with this tokenizer's beginning-of-text token; --bos-token auto adds it")
    return notes


def check_fraction(validation_fraction: float) -> None:
    """Raise UserError if the validation fraction is not in [0, 1)."""
    if not 0 <= validation_fraction < 1:
        raise UserError(f"--validation-fraction is {validation_fraction}; it must be at least 0 and below 1")


def _find_finished(prefix: Path, request: _Request) -> tuple[Manifest, Manifest | None] | None:
    """Return the manifests of the corpus at `prefix` if it is complete and the request would create the same corpus.
    Otherwise return None."""
    held_out = validation_prefix(prefix)
    try:
        train = read_manifest(prefix)
        if train is None or train.request != request.digest():
            return None
        IndexedDataset(prefix)
        if request.canaries is not None and not ledger_path(prefix).is_file():
            return None
        if request.validation_fraction == 0:
            return train, None
        IndexedDataset(held_out)
        validation = read_manifest(held_out)
    except UserError:  # A damaged corpus is created again.
        return None
    return (train, validation) if validation is not None else None


@contextmanager
def unfinished(prefix: Path) -> Iterator[Path]:
    """Create the folder OUT.parts for unfinished parts of a corpus, lock it, and yield its path. When the block ends,
    remove the folder if no parts are left in it."""
    if prefix.name in ("", ".."):
        raise UserError(f"--out {prefix} is a folder; name the corpus in it, such as {prefix / 'corpus'}")
    parts = Path(f"{prefix}.parts")
    with writing(parts):
        parts.mkdir(parents=True, exist_ok=True)
    with writing(parts), locked(parts / "lock", wait=False):
        try:
            yield parts
        finally:
            if all(path.name == "lock" for path in parts.iterdir()):
                (parts / "lock").unlink(missing_ok=True)
                with suppress(OSError):  # Removing the folder fails if another process is using it already.
                    parts.rmdir()


def _remove_all_but(parts: Path, stems: set[str]) -> None:
    """Remove all files in `parts` except the lock and files with these stems. Files with other stems are half-written,
    are no longer needed, or come from an earlier attempt with other input or another tokenizer."""
    for path in parts.iterdir():
        if path.name != "lock" and path.name.split(".")[0] not in stems:
            path.unlink()


def _train(request: _Request, vocab_size: int, path: Path) -> None:
    """Train a tokenizer on the input. If the files have more than 1 GiB, train on a random sample of about 1 GiB."""
    total = sum(file.size for file in request.files)
    share = _TRAINING_BYTES / max(total, 1)

    def texts(advance: Callable[[int], None]) -> Iterator[str]:
        number = 0
        for file in request.files:
            for text in read_documents(file.path, request.text_key):
                if share >= 1 or falls_within(np.array([number]), share, _TRAINING_SAMPLE_SEED)[0]:
                    yield text
                number += 1
            advance(file.size)

    with show_progress("train tokenizer", total) as advance:
        train_bpe(texts(advance), vocab_size, path)


def _check_filled(splits: dict[str, CorpusSplit], request: _Request) -> None:
    documents = sum(split.documents for split in splits.values())
    if documents == 0:
        raise UserError(f"{', '.join(request.inputs)}: no document has text; give other inputs, or --text-key")
    for name, split in splits.items():
        if split.documents == 0:
            raise UserError(
                f"{', '.join(request.inputs)}: --validation-fraction {request.validation_fraction} leaves no document "
                f"for {name} (documents: {documents}); choose another fraction, or add documents"
            )


def _publish(
    splits: dict[str, CorpusSplit], prefix: Path, request: _Request, tokenizer: Tokenizer, notes: list[str]
) -> tuple[Manifest, Manifest | None]:
    """Rename the merged corpora to their final names, write their manifests, and return the manifests. While some files
    are old and some are new, there is no manifest, so no reader mixes old and new files."""
    held_out = validation_prefix(prefix)
    manifest_path(prefix).unlink(missing_ok=True)
    if manifest_path(held_out).is_file():  # Remove only files that an earlier preparation wrote.
        for path in (manifest_path(held_out), idx_path(held_out), bin_path(held_out)):
            path.unlink(missing_ok=True)
    for name, split in splits.items():
        target = prefix if name == "train" else held_out
        os.replace(bin_path(split.prefix), bin_path(target))
        os.replace(idx_path(split.prefix), idx_path(target))
    how = {key: getattr(request, key) for key in ("inputs", "text_key", "validation_fraction", "seed")}
    return write_manifests(splits, prefix, tokenizer, **how, request=request.digest(), notes=notes)


def _list_files(prefix: Path, train: Manifest, validation: Manifest | None, canaries: Canaries | None) -> list[Path]:
    """Return the paths of all files of a finished corpus."""
    prefixes = [prefix] if validation is None else [prefix, Path(validation_prefix(prefix))]
    files = [path for each in prefixes for path in (bin_path(each), idx_path(each), manifest_path(each))]
    files += [] if canaries is None else [ledger_path(prefix)]
    return files if train.tokenizer == "bytes" else [*files, prefix.with_name(train.tokenizer)]
