"""Write small corpora of random tokens in the format of a run, for the trainer to read."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fourfold.config.run import RunConfig
from fourfold.data.indexed import IndexedWriter
from fourfold.data.manifest import CorpusSplit, trained_prefix, write_manifests
from fourfold.data.tokenizer import ByteTokenizer


def can_write(run: RunConfig) -> bool:
    """Return whether parity can write a random corpus for the run. This is always possible for plain text. For
    conversations, the vocabulary must have at least as many tokens as the byte tokenizer."""
    return run.data.format == "text" or run.model.vocab_size >= ByteTokenizer.vocab_size


def are_answers(tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return which tokens of a random corpus belong to answers. These are the tokens with an odd id, and the end token.
    So the reference can find the answers without the loader."""
    found: NDArray[np.bool_] = (tokens % 2 == 1) | (tokens == ByteTokenizer.eod_id)
    return found


def end_token(run: RunConfig) -> int:
    """Return the id of the token that ends each document and occurs nowhere else. For texts, the id is 0, because a
    small vocabulary has no special token."""
    return 0 if run.data.format == "text" else ByteTokenizer.eod_id


def write_corpus(prefix: Path, run: RunConfig, seed: int) -> None:
    """Write a random corpus of about two global batches. A second file marks the tokens of answers. Documents have
    random lengths, at most ``training.seq_length`` - 1 tokens."""
    draw = np.random.default_rng((5, seed))
    length, is_text = run.training.seq_length, run.data.format == "text"
    split = CorpusSplit(prefix, trained_tokens=None if is_text else 0)
    with IndexedWriter(prefix, run.model.vocab_size) as corpus, IndexedWriter(trained_prefix(prefix), 2) as answers:
        needed = 2 * run.training.global_batch_size * (length + 1)
        while split.tokens < needed or split.documents % 2:
            size = draw.integers(1 if is_text else 4, length)
            tokens = draw.integers(int(is_text), min(run.model.vocab_size, 256), size=size)
            tokens[-1] = end_token(run)
            is_answer = are_answers(tokens)
            corpus.add_document(tokens)
            answers.add_document(is_answer.astype(np.int64))
            split.count(1, len(tokens), trained=int(is_answer.sum()))
    if not is_text:
        request = {"inputs": [], "text_key": "text", "validation_fraction": 0.0, "seed": seed, "request": ""}
        write_manifests({"train": split}, prefix, ByteTokenizer(), format=run.data.format, **request)
