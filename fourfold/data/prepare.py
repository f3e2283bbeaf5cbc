"""Prepares a corpus on disk from text: tokenize, keep what is finished, merge, publish it whole."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fourfold.data.canaries import Canaries, ledger_path, plant
from fourfold.data.files import locked, writing
from fourfold.data.indexed import IndexedDataset, bin_path, idx_path
from fourfold.data.manifest import (
    CorpusSplit,
    Manifest,
    manifest_path,
    read_manifest,
    validation_prefix,
    write_manifests,
)
from fourfold.data.merge import falls_within, merge
from fourfold.data.progress import show_progress
from fourfold.data.shards import cut, decodings, digest
from fourfold.data.sources import TEXT_SUFFIXES, InputFile, left_out, list_inputs, read_documents
from fourfold.data.text_encoding import UnreadableFile, UnreadableFiles, named_files, text_encoding
from fourfold.data.tokenize_shards import tokenize_all
from fourfold.data.tokenizer import HFTokenizer, Tokenizer, load_tokenizer, train_bpe
from fourfold.errors import UserError
from fourfold.processes import available_cores

_TRAINING_BYTES = 1 << 30  # input that a tokenizer is trained on; more changes it little and takes hours
_TRAINING_SAMPLE_SEED = 0


@dataclass(frozen=True)
class PrepareSummary:
    """The result of `prepare`: the manifests of its splits, all files, the time, and whether it was there already."""

    train: Manifest
    validation: Manifest | None
    files: list[Path]
    seconds: float
    reused: bool
    notes: tuple[str, ...] = ()
    """What a user should know of how the input was read, such as files that were left out."""


@dataclass(frozen=True)
class _Request:
    """Everything that decides the content of a corpus; `tokenizer` is a fingerprint, or what to train."""

    inputs: list[str]
    files: list[InputFile]
    text_key: str
    tokenizer: str
    validation_fraction: float
    seed: int
    canaries: Canaries | None
    encoding: str | None = None

    def digest(self) -> str:
        planted = [] if self.canaries is None else [asdict(self.canaries)]
        return digest([self.tokens_digest(), self.validation_fraction, self.seed, *planted])

    def tokens_digest(self) -> str:
        files = [[file.path, file.size, file.mtime_ns] for file in self.files]
        encoding = [] if self.encoding is None else [self.encoding]
        return digest([files, self.text_key, self.tokenizer, *encoding])


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
    encoding: str | None = None,
    validation_fraction: float = 0.0,
    seed: int = 0,
    canaries: Canaries | None = None,
    force: bool = False,
) -> PrepareSummary:
    """Tokenize `inputs` into OUT.bin, OUT.idx and OUT.json, each document followed by the end-of-document token.

    An interrupted preparation continues from OUT.parts. A corpus already made from the same unchanged files in the same
    way is left as it is, unless `force`. Any other corpus at OUT is replaced. OUT.json is written last: if it exists,
    the corpus is complete.

    Args:
        inputs: See `list_inputs`.
        output_prefix: OUT, without a suffix.
        tokenizer: "bytes", or the path of a tokenizer.json, which is copied to OUT-tokenizer.json.
        train_tokenizer_vocab: Instead trains a tokenizer of this size on the input, into OUT-tokenizer.json.
        workers: Processes, by default one per core. The result does not depend on it.
        eos_token: The special token that ends every document. Default: the tokenizer's own, see ``HFTokenizer``.
        bos_token: The special token that begins every document, or "auto" for the tokenizer's own. Default: none.
        text_key: The key or column of the text, or several with commas: the first that a row has.
        encoding: The encoding of .txt and .txt.gz files that are not UTF-8 and have no byte-order mark.
        validation_fraction: The share of the documents, chosen by a hash of their number and `seed`, that goes to
            OUT-validation instead.
        seed: See `validation_fraction`.
        canaries: Documents to plant in the training split, with their ledger in OUT-canaries.jsonl.
        force: Makes a corpus again that is there already.

    Raises:
        UserError: Input or options cannot work (names the file and line), or a file cannot be written.
    """
    began = time.monotonic()
    ends = (eos_token, bos_token)
    identity = _checked(tokenizer, train_tokenizer_vocab, workers, validation_fraction, canaries, *ends)
    names = [str(item) for item in inputs]
    encoding = None if encoding is None else text_encoding(encoding)
    request = _Request(names, list_inputs(names), text_key, identity, validation_fraction, seed, canaries, encoding)
    prefix = Path(output_prefix)
    wanted = train_tokenizer_vocab if tokenizer is None else tokenizer
    assert wanted is not None, "_checked refuses neither"
    finished = None if force else _finished(prefix, request)
    train, validation = finished or _make(request, prefix, wanted, ends, workers or available_cores(), force)
    files = _files(prefix, train, validation, canaries)
    notes = (*train.notes, *notes_on(names, None))
    return PrepareSummary(train, validation, files, time.monotonic() - began, finished is not None, notes)


def _make(
    request: _Request,
    prefix: Path,
    tokenizer: str | Path | int,
    ends: tuple[str | None, str | None],
    workers: int,
    force: bool,
) -> tuple[Manifest, Manifest | None]:
    """Make the corpus; `tokenizer` may be the size of one to train."""
    if request.encoding is not None and not any(file.path.endswith(TEXT_SUFFIXES) for file in request.files):
        kinds = " and ".join(TEXT_SUFFIXES)
        raise UserError(f"--encoding {request.encoding} is for {kinds} files, and the input has none")
    with unfinished(prefix) as parts:
        if force:
            _remove_all_but(parts, set())
        trained = parts / f"tokenizer-{request.tokens_digest()}.json"
        if isinstance(tokenizer, int) and not trained.is_file():
            _train(request, tokenizer, trained)
        name = str(trained if isinstance(tokenizer, int) else tokenizer)
        loaded = load_tokenizer(name, *ends)
        shards = cut(request.files, request.text_key, name, loaded, request.encoding)
        _remove_all_but(parts, {trained.stem} | {shard.key for shard in shards})
        tokenize_all(shards, parts, workers)
        splits = merge(shards, parts, loaded.vocab_size, request.validation_fraction, request.seed)
        _check_filled(splits, request)
        if request.canaries is not None:
            with _saying(f"the tokenized text stays in {parts} for the next attempt"):
                ledger = ledger_path(prefix)
                splits["train"] = plant(splits["train"], request.canaries, loaded, request.text_key, ledger)
        else:
            ledger_path(prefix).unlink(missing_ok=True)  # of a corpus that was here before
        decoded = decodings(shards, parts)
        notes = [named_files(f"read as {how}", paths) for how, paths in decoded.items()] + notes_on([], loaded)
        if request.encoding is not None and not any(how.startswith(request.encoding) for how in decoded):
            notes.append(f"--encoding {request.encoding} applied to no file: all are UTF-8, or have a byte-order mark")
        made = _publish(splits, prefix, request, loaded, notes)
        _remove_all_but(parts, set())
    return made


def _checked(
    tokenizer: str | Path | None,
    train_vocab: int | None,
    workers: int | None,
    fraction: float,
    canaries: Canaries | None,
    eos_token: str | None,
    bos_token: str | None,
) -> str:
    """Raise UserError for options that cannot work; the fingerprint of the tokenizer, or what to train."""
    if (tokenizer is None) == (train_vocab is None):
        raise UserError(
            "choose one tokenizer: --tokenizer bytes, --tokenizer PATH of a tokenizer.json, or --train-tokenizer VOCAB"
        )
    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: at least 1 process is needed")
    check_fraction(fraction)
    if canaries is not None:
        canaries.check()
        if bos_token is not None:
            raise UserError("--bos-token does not go with --canaries, which are planted as text alone; leave one out")
    if tokenizer is not None:
        return load_tokenizer(tokenizer, eos_token, bos_token).fingerprint
    if (eos_token, bos_token) != (None, None):
        raise UserError(
            "--eos-token and --bos-token go with --tokenizer; a trained one ends documents with <|endoftext|>"
        )
    return f"train {train_vocab}"


def notes_on(inputs: list[str], tokenizer: Tokenizer | None) -> list[str]:
    """Return what a user should know: files that were left out, and a beginning-of-text token that was."""
    notes = [named_files(f"left out, {why}", paths) for why, paths in left_out(inputs).items()]
    if isinstance(tokenizer, HFTokenizer) and tokenizer.usually_begins and not tokenizer.begins_documents:
        notes.append(
            "documents begin without the token that this tokenizer begins texts with; --bos-token auto adds it"
        )
    return notes


def check_fraction(validation_fraction: float) -> None:
    if not 0 <= validation_fraction < 1:
        raise UserError(f"--validation-fraction {validation_fraction} must be at least 0 and below 1")


def _finished(prefix: Path, request: _Request) -> tuple[Manifest, Manifest | None] | None:
    """Return the manifests of the corpus at `prefix` if it is complete and is what the request would make."""
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
    except UserError:  # a damaged corpus is made anew
        return None
    return (train, validation) if validation is not None else None


@contextmanager
def unfinished(prefix: Path) -> Iterator[Path]:
    """Yield the locked folder of unfinished parts, which is removed when nothing is left in it."""
    if prefix.name in ("", ".."):
        raise UserError(f"--out {prefix} is a folder; name the corpus in it, such as {prefix / 'corpus'}")
    parts = Path(f"{prefix}.parts")
    with _saying("choose another output prefix"), writing(parts):
        parts.mkdir(parents=True, exist_ok=True)
    with writing(parts), locked(parts / "lock", wait=False):
        try:
            yield parts
        finally:
            if all(path.name == "lock" for path in parts.iterdir()):
                (parts / "lock").unlink(missing_ok=True)
                with suppress(OSError):  # another process has begun in it
                    parts.rmdir()


@contextmanager
def _saying(more: str) -> Iterator[None]:
    """Add to the message of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}; {more}") from None


def _remove_all_but(parts: Path, stems: set[str]) -> None:
    """Remove parts that earlier attempts made from other input or another tokenizer, and half-written files."""
    for path in parts.iterdir():
        if path.name != "lock" and path.name.split(".")[0] not in stems:
            path.unlink()


def _train(request: _Request, vocab_size: int, path: Path) -> None:
    """Train a tokenizer on a small input, or on an even sample of the documents of a large one."""
    total = sum(file.size for file in request.files)
    share = _TRAINING_BYTES / max(total, 1)

    def texts(advance: Callable[[int], None]) -> Iterator[str]:
        number = 0
        failed: list[UnreadableFile] = []
        for file in request.files:
            try:
                for text in read_documents(file.path, request.text_key, encoding=request.encoding):
                    if share >= 1 or falls_within(np.array([number]), share, _TRAINING_SAMPLE_SEED)[0]:
                        yield text
                    number += 1
            except UnreadableFile as error:
                failed.append(error)
            advance(file.size)
        if failed:
            raise UnreadableFiles(failed)

    with show_progress("train tokenizer", total) as advance:
        train_bpe(texts(advance), vocab_size, path)


def _check_filled(splits: dict[str, CorpusSplit], request: _Request) -> None:
    documents = sum(split.documents for split in splits.values())
    if documents == 0:
        raise UserError(f"{', '.join(request.inputs)}: no document has any text, so there is nothing to prepare")
    for name, split in splits.items():
        if split.documents == 0:
            raise UserError(
                f"{', '.join(request.inputs)}: --validation-fraction {request.validation_fraction} leaves none "
                f"for {name} (documents: {documents}); choose another fraction, or add documents"
            )


def _publish(
    splits: dict[str, CorpusSplit], prefix: Path, request: _Request, tokenizer: Tokenizer, notes: list[str]
) -> tuple[Manifest, Manifest | None]:
    """Move the merged corpora to their names. No manifest stands beside a mix of old and new files meanwhile."""
    _withdraw(prefix)
    for name, split in splits.items():
        target = prefix if name == "train" else validation_prefix(prefix)
        os.replace(bin_path(split.prefix), bin_path(target))
        os.replace(idx_path(split.prefix), idx_path(target))
    return write_manifests(
        splits,
        prefix,
        tokenizer,
        inputs=request.inputs,
        text_key=request.text_key,
        validation_fraction=request.validation_fraction,
        seed=request.seed,
        request=request.digest(),
        notes=notes,
    )


def _withdraw(prefix: Path) -> None:
    """Remove the manifest of an earlier corpus at `prefix`, and the validation split that would be left over."""
    manifest_path(prefix).unlink(missing_ok=True)
    held_out = validation_prefix(prefix)
    if manifest_path(held_out).is_file():  # never files that no preparation made
        for path in (manifest_path(held_out), idx_path(held_out), bin_path(held_out)):
            path.unlink(missing_ok=True)


def _files(prefix: Path, train: Manifest, validation: Manifest | None, canaries: Canaries | None) -> list[Path]:
    """Return all files of a finished corpus."""
    prefixes = [prefix] if validation is None else [prefix, Path(validation_prefix(prefix))]
    files = [path for each in prefixes for path in (bin_path(each), idx_path(each), manifest_path(each))]
    files += [] if canaries is None else [ledger_path(prefix)]
    return files if train.tokenizer == "bytes" else [*files, prefix.with_name(train.tokenizer)]
