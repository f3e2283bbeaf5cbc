"""The corpora of a run file's [data], and the micro-batches of this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig
from fourfold.data.build import build_dataset, check_one_tokenizer, ensure_builtin, open_run_tokenizer, open_stream
from fourfold.data.conversations import PackedConversations, PackingStatistics
from fourfold.data.dataset import Samples, SourceMixture
from fourfold.data.goldfish import Goldfish
from fourfold.data.indexed import check_exists
from fourfold.data.loader import Loader, MicroBatch
from fourfold.data.manifest import read_manifest, validation_prefix
from fourfold.data.mask_preview import MaskStatistics, Preview, preview
from fourfold.data.masks import LossMask, build_masks, labels_of
from fourfold.data.preferences import PreferencePairs
from fourfold.data.stream import StreamedWindows
from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import UserError
from fourfold.huggingface.tokenizer_file import added_beyond
from fourfold.parallel.attention.context import share_of_sequences
from fourfold.parallel.grid.grid import Axis

VALIDATION_SEED = 1
STATISTICS_TOKENS = 1 << 17
"""Tokens of training data on which a goldfish mask is measured before training; it takes milliseconds."""
FIRST_SAMPLES = 16

Source = tuple[str, float]
"""Prefix and weight of a corpus."""


@dataclass(frozen=True)
class Corpora:
    """The loaders of this process, and the data that they read."""

    train: Loader
    validation: Loader | None
    samples: Samples
    """The training data."""

    tokenizer: Tokenizer | None
    """The tokenizer of the corpus; None where the corpus does not name it."""

    masks: list[LossMask]
    """The masks of the loss besides goldfish; validation has these only."""

    goldfish: Goldfish | None

    @property
    def stream(self) -> StreamedWindows | None:
        """The training data where it is streamed."""
        return self.samples if isinstance(self.samples, StreamedWindows) else None

    def close(self) -> None:
        """End the threads that read ahead."""
        if self.stream is not None:
            self.stream.close()  # first: the loader may wait for it
        self.train.close()

    def packing(self) -> list[PackingStatistics]:
        """Statistics of how full the sequences of each corpus of conversations are."""
        sources = self.samples.sources if isinstance(self.samples, SourceMixture) else []
        return [source.statistics for source in sources if isinstance(source, PackedConversations)]

    def pairs(self) -> list[PreferencePairs]:
        """The pairs of answers of the training and of the validation data."""
        mixtures = [self.samples] if self.validation is None else [self.samples, self.validation.dataset]
        sources = [source for mixture in mixtures if isinstance(mixture, SourceMixture) for source in mixture.sources]
        return [source for source in sources if isinstance(source, PreferencePairs)]

    @cached_property
    def first_samples(self) -> str | None:
        """A digest of the first samples of each corpus on disk, and of all together; None where streamed."""
        if self.stream is not None:
            return None
        sources = self.samples.sources if isinstance(self.samples, SourceMixture) else []
        digest = xxhash.xxh3_128()
        for samples in (self.samples, *sources):
            digest.update(samples.read(np.arange(FIRST_SAMPLES)).tokens.tobytes())
        return digest.hexdigest()

    def trained_share(self) -> float:
        """Share of the tokens at the beginning of the training data that every mask keeps."""
        masks: list[LossMask] = self.masks if self.goldfish is None else [*self.masks, self.goldfish]
        windows = self.train.dataset.read(np.arange(max(1, STATISTICS_TOKENS // self.train.dataset.seq_length)))
        return float((labels_of(windows, masks) != IGNORE_INDEX).mean())

    def goldfish_statistics(self) -> MaskStatistics | None:
        """Drop rate and longest span at the beginning of the training data; None without a goldfish mask."""
        if self.goldfish is None:
            return None
        return preview(self.train.dataset, self.masks, self.goldfish, 0, STATISTICS_TOKENS).statistics


def open_corpora(run: RunConfig, batch: Axis) -> Corpora:
    """Open the corpora, or make that of a built-in source; ``batch`` is the axis that splits the global batch.

    Raises ``UserError`` for a missing or damaged corpus, and one whose vocabulary is not the model's.
    """
    train, validation = _prefixes(run)
    for prefix, _ in [*train, *validation]:
        _check_vocabulary(prefix, run)
        _check_format(prefix, run)
    check_one_tokenizer([prefix for prefix, _ in [*train, *validation]])
    tokenizer = _tokenizer(run)
    if run.data.is_streamed:
        _check_validation(run, validation, tokenizer)
    if run.sample.prompt is not None and tokenizer is None:
        raise UserError(
            f"sample.prompt needs a tokenizer, and {train[0][0]}.json, which would name it, does not exist; "
            "set data.tokenizer, or leave sample.prompt out"
        )
    needs_validation = run.validation.interval > 0
    if needs_validation and not validation:
        raise UserError("validation.interval is set, but data.validation names no corpus; name one, or set it to 0")
    samples, masks, goldfish = _training_data(run, train, tokenizer)
    held_out = None
    if needs_validation:
        unseen = build_dataset(validation, run.training.seq_length, VALIDATION_SEED)
        held_out = _loader(run, unseen, batch, masks, prefetch=False)
    of_training: list[LossMask] = masks if goldfish is None else [*masks, goldfish]
    return Corpora(
        train=_loader(run, samples, batch, of_training, prefetch=True),
        validation=held_out,
        samples=samples,
        tokenizer=tokenizer,
        masks=masks,
        goldfish=goldfish,
    )


def preview_masks(run: RunConfig, samples: int, tokens: int) -> tuple[Preview, Tokenizer | None]:
    """The masks of a run on the beginning of its training data, in one process and without a model."""
    train, _ = _prefixes(run)
    for prefix, _ in train:
        _check_format(prefix, run)
    tokenizer = _tokenizer(run)
    dataset, masks, goldfish = _training_data(run, train, tokenizer)
    try:
        return preview(dataset, masks, goldfish, samples, tokens), tokenizer
    finally:
        if isinstance(dataset, StreamedWindows):
            dataset.close()


def _training_data(
    run: RunConfig, train: list[Source], tokenizer: Tokenizer | None
) -> tuple[Samples, list[LossMask], Goldfish | None]:
    """The training data, the masks of the loss besides goldfish, and the goldfish mask."""
    training = run.training
    masks, goldfish = build_masks(run.masks, tokenizer, training.seq_length, training.global_batch_size)
    look_back = 0 if goldfish is None else goldfish.look_back
    if run.data.is_streamed:
        return open_stream(run, look_back), masks, goldfish
    return build_dataset(train, training.seq_length, training.seed, look_back), masks, goldfish


def micro_batches(
    batches: Sequence[MicroBatch[NDArray[Any]]], run: RunConfig, cp: Axis, device: torch.device
) -> list[MicroBatch[Tensor]]:
    """A loader's micro-batches as tensors on the device: this rank's share of each sequence."""

    def tensor(array: NDArray[Any]) -> Tensor:
        found = torch.from_numpy(array)
        # The host does not wait for a copy from pinned memory.
        return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)

    found = []
    for batch in batches:
        _check_tokens(batch, run.model.vocab_size)
        if not run.data.mask_documents:
            batch = replace(batch, positions=None, document_ends=None)
        if not run.model.num_experts:
            batch = replace(batch, is_data=None)
        found.append(share_of_sequences(batch.map(tensor), cp))
    return found


def _check_tokens(batch: MicroBatch[NDArray[Any]], vocab_size: int) -> None:
    """Raise ``UserError`` for a token outside the vocabulary, which the embedding would treat as another rank's."""
    smallest, largest = int(batch.tokens.min()), int(batch.tokens.max())
    if batch.labels is not None:
        largest = max(largest, int(batch.labels.max()))
    if smallest < 0 or largest >= vocab_size:
        raise UserError(
            f"the corpus has token {smallest if smallest < 0 else largest}, and model.vocab_size = "
            f"{vocab_size}; set it to the size of the tokenizer's vocabulary, or prepare the corpus again"
        )


def _prefixes(run: RunConfig) -> tuple[list[Source], list[Source]]:
    """The training and the validation corpora."""
    data = run.data
    if data.source is None or data.is_streamed:
        return [(c.path, c.weight) for c in data.train], [(c.path, c.weight) for c in data.validation]
    # One process makes the corpus, and the others find it.
    if dist.is_initialized() and dist.get_rank() > 0:
        dist.barrier()
    prefix = ensure_builtin(data.source, data.tokenizer, data.cache_dir, run.model.vocab_size)
    if dist.is_initialized() and dist.get_rank() == 0:
        dist.barrier()
    return [(prefix, 1.0)], [(validation_prefix(prefix), 1.0)]


def _loader(run: RunConfig, dataset: Samples, batch: Axis, masks: list[LossMask], *, prefetch: bool) -> Loader:
    training = run.training
    sizes = (training.seq_length, training.global_batch_size, training.micro_batch_size)
    return Loader(dataset, *sizes, batch.rank, batch.size, masks, prefetch=prefetch)


def _check_vocabulary(prefix: str, run: RunConfig) -> None:
    manifest = read_manifest(prefix)
    if manifest is not None and manifest.vocab_size > run.model.vocab_size:
        beyond = added_beyond(run.model) if run.model.from_hf is not None else 0
        _check_fits(f"the corpus {prefix} was made with", manifest.vocab_size - beyond, run)


def _check_format(prefix: str, run: RunConfig) -> None:
    """Raise ``UserError`` for a corpus of another format: conversations read as text would train prompts too."""
    manifest = read_manifest(prefix)
    if manifest is None:
        check_exists(prefix)
    made = "text" if manifest is None else manifest.format
    if made != run.data.format:
        remedy = f"set data.format = '{made}'"
        if run.data.format != "text":
            remedy += f", or prepare it with `fourfold prepare --format {run.data.format}`"
        raise UserError(
            f"the corpus {prefix} is of the format '{made}', and data.format = '{run.data.format}'; {remedy}"
        )


def _check_fits(whose: str, vocab_size: int, run: RunConfig) -> None:
    if vocab_size > run.model.vocab_size:
        raise UserError(
            f"{whose} a vocabulary of {vocab_size}, and model.vocab_size = {run.model.vocab_size}; "
            f"set model.vocab_size = {vocab_size}, or use another tokenizer"
        )


def _tokenizer(run: RunConfig) -> Tokenizer | None:
    tokenizer = open_run_tokenizer(run)
    data = run.data
    if tokenizer is not None and data.tokenizer is not None and (data.source is None or data.is_streamed):
        _check_fits(f"data.tokenizer = '{run.data.tokenizer}' has", tokenizer.vocab_size, run)
    return tokenizer


def _check_validation(run: RunConfig, validation: list[Source], tokenizer: Tokenizer | None) -> None:
    """Raise ``UserError`` for a validation corpus of another tokenizer than that of the streamed training data."""
    for prefix, _ in validation:
        manifest = read_manifest(prefix)
        if manifest is not None and tokenizer is not None and manifest.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"the corpus {prefix} was made with {manifest.tokenizer}, and data.tokenizer = '{run.data.tokenizer}' "
                "is another; prepare it with the same tokenizer"
            )
