"""Open the training and validation data of a run, and copy this process's micro-batches to its device."""

from collections import defaultdict
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

from fourfold.config.data_section import DataConfig
from fourfold.config.run import RunConfig
from fourfold.data.conversations import PackedConversations, PackingStatistics, PreferencePairs
from fourfold.data.dataset import Samples, SourceMixture
from fourfold.data.goldfish import Goldfish
from fourfold.data.indexed import check_exists
from fourfold.data.loader import Loader, MicroBatch
from fourfold.data.manifest import read_manifest, validation_prefix
from fourfold.data.mask_preview import Preview, preview
from fourfold.data.masks import LossMask, build_masks
from fourfold.data.run_data import build_dataset, check_one_tokenizer, ensure_builtin, open_run_tokenizer, open_stream
from fourfold.data.stream import StreamedWindows
from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import UserError
from fourfold.huggingface.tokenizer_file import added_beyond
from fourfold.parallel.attention.context import share_of_sequences
from fourfold.parallel.grid.grid import Axis

VALIDATION_SEED = 1
STATISTICS_TOKENS = 1 << 17
"""Before training, the run estimates from this number of tokens how many tokens the loss masks leave out. The estimate
takes milliseconds."""
FIRST_SAMPLES = 16
"""Number of samples per corpus that a digest in ``Corpora.first_samples`` covers."""

Source = tuple[str, float]
"""Path prefix of a corpus, and the weight of the corpus in the mixture of corpora."""


@dataclass(frozen=True)
class Corpora:
    """The training and validation data of a run, as this process loads it."""

    train: Loader
    validation: Loader | None

    tokenizer: Tokenizer | None
    """The tokenizer of the corpora, or None if neither the corpora nor the run file name one."""

    masks: list[LossMask]
    """The loss masks except goldfish. They decide which tokens are in the loss. Validation uses only these masks."""

    goldfish: Goldfish | None
    """The goldfish mask, which drops some further tokens from the training loss. None if the run has no such mask."""
    data: DataConfig
    """The section [data] of the run file."""

    @property
    def stream(self) -> StreamedWindows | None:
        """Return the training data if it is streamed, else None."""
        return self.train.dataset if isinstance(self.train.dataset, StreamedWindows) else None

    def close(self) -> None:
        """Stop the threads that read ahead."""
        if self.stream is not None:
            self.stream.close()  # Close the stream first, because the loader may be waiting for a document from it.
        self.train.close()

    def packing(self) -> list[PackingStatistics]:
        """Return the packing statistics of each training corpus that consists of conversations."""
        sources = self.train.dataset.sources if isinstance(self.train.dataset, SourceMixture) else []
        return [source.statistics for source in sources if isinstance(source, PackedConversations)]

    def pairs(self) -> list[PreferencePairs]:
        """Return the corpora of answer pairs (for DPO), first from the training data, then from the validation data."""
        mixtures = [each.dataset for each in (self.train, self.validation) if each is not None]
        sources = [source for mixture in mixtures if isinstance(mixture, SourceMixture) for source in mixture.sources]
        return [source for source in sources if isinstance(source, PreferencePairs)]

    @cached_property
    def first_samples(self) -> dict[str, str]:
        """Return digests, by name, that reveal whether data on disk has changed.

        The digest of the training or validation data covers the first samples of each corpus and of the mixture of the
        corpora. An answer mask marks the tokens of answers. Its digest covers the whole mask, because a change may
        affect only a few tokens. Streamed data has no digest.
        """
        found: dict[str, Any] = defaultdict(xxhash.xxh3_128)
        validation = None if self.validation is None else self.validation.dataset
        for name, mixture in (("training data", self.train.dataset), ("validation data", validation)):
            for samples in (mixture, *mixture.sources) if isinstance(mixture, SourceMixture) else ():
                found[name].update(samples.read(np.arange(FIRST_SAMPLES)).tokens.tobytes())
                if isinstance(samples, PackedConversations | PreferencePairs):
                    found[f"answer mask of the {name}"].update(samples.answers.read(0, samples.answers.tokens).data)
        return {name: digest.hexdigest() for name, digest in found.items()}

    def preview(self) -> Preview:
        """Count how many tokens the masks leave out of the loss at the beginning of the training data."""
        return preview(self.train.dataset, self.masks, self.goldfish, 0, STATISTICS_TOKENS)


def open_corpora(run: RunConfig, batch: Axis) -> Corpora:
    """Open the training and validation data of a run. If the run uses the built-in corpus, and this corpus does not
    exist yet, prepare it first.

    Args:
        run: The run's settings.
        batch: The axis whose ranks split the global batch.

    Raises:
        UserError: A corpus is missing, damaged, or does not fit the run (format, tokenizer, or vocabulary). Or the run
            file lacks a tokenizer or a validation corpus that it needs.
    """
    train, validation = _prefixes(run)
    for prefix, _ in [*train, *validation]:
        _check_corpus(prefix, run)
    check_one_tokenizer([prefix for prefix, _ in [*train, *validation]])
    tokenizer = _tokenizer(run)
    if run.data.is_streamed:
        _check_validation(run, validation, tokenizer)
    if run.sample.prompt is not None and tokenizer is None:
        raise UserError(
            f"sample.prompt needs a tokenizer, but {train[0][0]}.json, which would name one, does not exist; "
            "set data.tokenizer, or leave sample.prompt out"
        )
    needs_validation = run.validation.interval > 0
    if needs_validation and not validation:
        raise UserError(
            "validation.interval is set, but data.validation names no corpus; name a corpus, or set "
            "validation.interval = 0"
        )
    samples, masks, goldfish = _training_data(run, train, tokenizer)
    held_out = None
    if needs_validation:
        unseen = build_dataset(validation, run.training.seq_length, VALIDATION_SEED)
        held_out = make_loader(run, unseen, batch, masks, prefetch=False)
    of_training: list[LossMask] = masks if goldfish is None else [*masks, goldfish]
    loader = make_loader(run, samples, batch, of_training, prefetch=True)
    return Corpora(loader, held_out, tokenizer=tokenizer, masks=masks, goldfish=goldfish, data=run.data)


def preview_masks(run: RunConfig, samples: int, tokens: int) -> tuple[Preview, Tokenizer | None]:
    """Preview which tokens the run's loss masks leave out at the beginning of its training data.

    One process is enough, and no model is needed.

    Args:
        run: The run's settings.
        samples: Number of training sequences in the preview.
        tokens: Approximate number of tokens that the statistics in the preview cover.

    Returns:
        The preview, then the tokenizer. The tokenizer is None if the run has none.
    """
    train, _ = _prefixes(run)
    for prefix, _ in train:
        _check_corpus(prefix, run)
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
    """Return the training data, the loss masks except goldfish, and the goldfish mask (or None)."""
    training = run.training
    masks, goldfish = build_masks(run.masks, tokenizer, training.seq_length, training.global_batch_size)
    look_back = 0 if goldfish is None else goldfish.look_back
    if run.data.is_streamed:
        return open_stream(run, look_back), masks, goldfish
    return build_dataset(train, training.seq_length, training.seed, look_back), masks, goldfish


def micro_batches(
    batches: Sequence[MicroBatch[NDArray[Any]]], run: RunConfig, cp: Axis, device: torch.device
) -> list[MicroBatch[Tensor]]:
    """Copy a loader's micro-batches to the device, and take this rank's share of each sequence (context parallelism).

    Args:
        batches: Micro-batches of full sequences, from the loader.
        run: The run's settings.
        cp: The axis whose ranks share each sequence.
        device: The device to copy to.

    Raises:
        UserError: A token is outside the model's vocabulary.
    """

    def tensor(array: NDArray[Any]) -> Tensor:
        found = torch.from_numpy(array)
        # Pin the memory first, because a copy from unpinned memory would block.
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
    """Refuse a token outside the vocabulary. The embedding would not notice such a token. Each rank has only some rows
    of the embedding, and would assume that another rank has the token's row."""
    smallest, largest = int(batch.tokens.min()), int(batch.tokens.max())
    if batch.labels is not None:
        largest = max(largest, int(batch.labels.max()))
    if smallest < 0 or largest >= vocab_size:
        raise UserError(
            f"the corpus has token {smallest if smallest < 0 else largest}, but model.vocab_size = "
            f"{vocab_size}; set it to the size of the tokenizer's vocabulary, or prepare the corpus again"
        )


def _prefixes(run: RunConfig) -> tuple[list[Source], list[Source]]:
    """Return the training corpora, then the validation corpora."""
    data = run.data
    if data.source is None or data.is_streamed:
        return [(c.path, c.weight) for c in data.train], [(c.path, c.weight) for c in data.validation]
    # All other ranks wait until rank 0 has created the corpus.
    if dist.is_initialized() and dist.get_rank() > 0:
        dist.barrier()
    prefix = ensure_builtin(data.tokenizer, data.cache_dir, run.model.vocab_size)
    if dist.is_initialized() and dist.get_rank() == 0:
        dist.barrier()
    return [(prefix, 1.0)], [(validation_prefix(prefix), 1.0)]


def make_loader(run: RunConfig, dataset: Samples, batch: Axis, masks: Sequence[LossMask], *, prefetch: bool) -> Loader:
    """Return a loader that reads this process's share of each batch.

    Args:
        run: The run's settings.
        dataset: The samples to read.
        batch: The axis whose ranks split the global batch.
        masks: Masks of the loss. A token is in the loss if all masks keep it.
        prefetch: Whether a thread assembles the next step's micro-batches during the current step.
    """
    training = run.training
    sizes = (training.seq_length, training.global_batch_size, training.micro_batch_size)
    depths = run.model.num_nextn_predict_layers
    return Loader(dataset, *sizes, batch.rank, batch.size, masks, prefetch=prefetch, depths=depths)


def _check_corpus(prefix: str, run: RunConfig) -> None:
    """Refuse a corpus whose vocabulary is too large, or whose format is not ``data.format``. For example, a run that
    reads conversations as text would also train on the prompts."""
    manifest = read_manifest(prefix)
    if manifest is None:
        check_exists(prefix)
    elif manifest.vocab_size > run.model.vocab_size:
        beyond = added_beyond(run.model) if run.model.from_hf is not None else 0
        _check_fits(f"the corpus {prefix} was made with", manifest.vocab_size - beyond, run)
    made = "text" if manifest is None else manifest.format
    if made != run.data.format:
        remedy = f"set data.format = '{made}'"
        if run.data.format != "text":
            remedy += f", or prepare it with `fourfold prepare --format {run.data.format}`"
        raise UserError(f"the corpus {prefix} has the format '{made}', but data.format = '{run.data.format}'; {remedy}")


def _check_fits(whose: str, vocab_size: int, run: RunConfig) -> None:
    if vocab_size > run.model.vocab_size:
        raise UserError(
            f"{whose} a vocabulary of {vocab_size}, but model.vocab_size = {run.model.vocab_size}; "
            f"set model.vocab_size = {vocab_size}, or use another tokenizer"
        )


def _tokenizer(run: RunConfig) -> Tokenizer | None:
    tokenizer = open_run_tokenizer(run)
    data = run.data
    if tokenizer is not None and data.tokenizer is not None and (data.source is None or data.is_streamed):
        _check_fits(f"data.tokenizer = '{run.data.tokenizer}' has", tokenizer.vocab_size, run)
    return tokenizer


def _check_validation(run: RunConfig, validation: list[Source], tokenizer: Tokenizer | None) -> None:
    """Refuse a validation corpus if its tokenizer differs from the tokenizer of the streamed training data."""
    for prefix, _ in validation:
        manifest = read_manifest(prefix)
        if manifest is not None and tokenizer is not None and manifest.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"the corpus {prefix} was made with {manifest.tokenizer}, but data.tokenizer = '{run.data.tokenizer}' "
                "is a different one; prepare the corpus with data.tokenizer"
            )
