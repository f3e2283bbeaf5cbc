"""Open the corpora that a run file names. The built-in corpus, Python's standard library, is prepared on first use."""

import platform
from collections.abc import Callable, Sequence
from pathlib import Path

from fourfold.config.data_section import DataConfig
from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import locked, writing
from fourfold.data.conversations import PackedConversations, PreferencePairs
from fourfold.data.dataset import Samples, SourceMixture, TokenWindows
from fourfold.data.hub import HubDataset
from fourfold.data.manifest import corpus_tokenizer, open_as_made, read_manifest
from fourfold.data.prepare import prepare
from fourfold.data.shuffled_documents import ShuffledDocuments
from fourfold.data.sources import PYTHON_STDLIB
from fourfold.data.stream import DocumentStream, StreamedWindows
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import UserError, given_as

_VALIDATION_FRACTION = 0.02

KINDS: dict[str, Callable[[str | Path, int, int, int], Samples]] = {
    "text": TokenWindows,
    "sft": PackedConversations,
    "preferences": PreferencePairs,
}
"""Maps the format of a corpus to the class that reads its samples."""


def build_dataset(
    sources: Sequence[tuple[str | Path, float]], seq_length: int, seed: int, look_back: int = 0
) -> SourceMixture:
    """Open a mixture of prepared corpora.

    Args:
        sources: The path prefix and the weight of each corpus. Only the ratios of the weights matter.
        seq_length: Number of tokens per sample.
        seed: Seed of the order of samples.
        look_back: Number of extra tokens before each sample. Only masks read these tokens.

    Raises:
        UserError: A corpus is missing, damaged, or too small, a weight is not positive or too small, or the manifests
            name different tokenizers.
    """
    check_one_tokenizer([prefix for prefix, _ in sources])
    samples: list[tuple[Samples, float]] = []
    for number, (prefix, weight) in enumerate(sources):
        manifest = read_manifest(prefix)
        open_samples = KINDS["text" if manifest is None else manifest.format]
        samples.append((open_samples(prefix, seq_length, seed + number, look_back), weight))
    return SourceMixture(samples, seed)


def open_stream(run: RunConfig, look_back: int = 0) -> StreamedWindows:
    """Open the streamed dataset of a run.

    Args:
        run: The run file. `data.source` names a dataset of the Hub or a folder.
        look_back: Number of extra tokens before each sample. Only masks read these tokens.

    Raises:
        UserError: The dataset or the tokenizer cannot be loaded, or the dataset has too few files for `data.streams`.
    """
    data, training = run.data, run.training
    assert data.source is not None, "config/run.py checks it"
    dataset = HubDataset.parse(data.source)

    def order(documents: DocumentStream) -> DocumentStream:
        size = data.shuffle_buffer
        return ShuffledDocuments(documents, size, training.seed) if size else documents

    return StreamedWindows(
        str(dataset),
        dataset.streams(data.streams, data.text_key),
        _load_named(data),
        training.seq_length,
        training.global_batch_size,
        look_back,
        ahead=data.read_ahead * training.global_batch_size // data.streams,
        timeout=data.read_timeout,
        order=order,
    )


def ensure_builtin(tokenizer: str | Path | None = None, cache_dir: str | Path = "data", vocab_size: int = 4096) -> str:
    """Return the prefix of the built-in corpus. Prepare the corpus first if it does not exist yet.

    2 % of the corpus is held out for validation, under the prefix that `validation_prefix` returns. Any number of
    processes can call this function at the same time: one prepares the corpus, and the other processes wait.

    Args:
        tokenizer: "bytes" or the path of a tokenizer.json. None trains a tokenizer.
        cache_dir: Folder of the prepared corpora.
        vocab_size: Vocabulary size of the trained tokenizer. Ignored if `tokenizer` is given.

    Raises:
        UserError: The tokenizer cannot be opened, or `prepare` failed.
    """
    with given_as("data.tokenizer"):
        label = f"bpe{vocab_size}" if tokenizer is None else load_tokenizer(tokenizer).fingerprint[:12]
    stem = f"{PYTHON_STDLIB}-{platform.python_version()}-{label}"
    cache = Path(cache_dir)
    prefix = cache / stem
    if read_manifest(prefix) is None:
        with writing(cache), locked(cache / f"{stem}.lock", wait=True):
            if read_manifest(prefix) is None:
                prepare(
                    [PYTHON_STDLIB],
                    prefix,
                    tokenizer=tokenizer,
                    train_tokenizer_vocab=vocab_size if tokenizer is None else None,
                    validation_fraction=_VALIDATION_FRACTION,
                )
    return str(prefix)


def _load_named(data: DataConfig) -> Tokenizer:
    """Open the tokenizer that the run file names."""
    assert data.tokenizer is not None, "config/run.py checks it"
    with given_as("data.tokenizer"):
        return load_tokenizer(data.tokenizer, data.eos_token, data.bos_token)


def open_run_tokenizer(run: RunConfig) -> Tokenizer | None:
    """Open the tokenizer of the run's corpora.

    Returns:
        The tokenizer, or None if neither the corpora nor the run file name one.

    Raises:
        UserError: The tokenizer cannot be opened, or `data.tokenizer` is not the tokenizer that made the corpora.
    """
    data = run.data
    if data.is_streamed:
        return _load_named(data)
    if data.source is not None:
        return corpus_tokenizer(ensure_builtin(data.tokenizer, data.cache_dir, run.model.vocab_size))
    prefix = data.train[0].path
    manifest = read_manifest(prefix)
    if manifest is None:
        return None if data.tokenizer is None else _load_named(data)
    made_with = corpus_tokenizer(prefix)
    with given_as("data.tokenizer"):
        tokenizer = made_with if data.tokenizer is None else open_as_made(data.tokenizer, manifest)
    if tokenizer is None:
        raise UserError(
            f"data.tokenizer = '{data.tokenizer}' is not the tokenizer that made {prefix}.bin; leave data.tokenizer "
            "out to use the corpus's own tokenizer, or prepare the corpus again"
        )
    return tokenizer


def check_one_tokenizer(prefixes: Sequence[str | Path]) -> None:
    """Check that all corpora were made with one tokenizer. Corpora without a manifest are not checked.

    Raises:
        UserError: The manifests name different tokenizers.
    """
    known = {str(prefix): manifest for prefix in prefixes if (manifest := read_manifest(prefix)) is not None}
    if len({manifest.fingerprint for manifest in known.values()}) > 1:
        made_with = "; ".join(f"{prefix} with {manifest.tokenizer}" for prefix, manifest in known.items())
        raise UserError(
            f"the corpora of [data] were made with different tokenizers ({made_with}); prepare them with one tokenizer"
        )
