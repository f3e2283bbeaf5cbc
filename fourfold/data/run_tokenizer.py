"""The tokenizer of a run's data."""

from __future__ import annotations

from fourfold.config.run import RunConfig
from fourfold.data.build import ensure_builtin
from fourfold.data.manifest import corpus_tokenizer, read_manifest
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import UserError


def tokenizer_of_run(run: RunConfig) -> Tokenizer | None:
    """The tokenizer that made the run's corpora; None where neither they nor the run file name one.

    Raises ``UserError`` where ``data.tokenizer`` is another one.
    """
    data = run.data
    if data.source is not None:
        return corpus_tokenizer(ensure_builtin(data.source, data.tokenizer, data.cache_dir, run.model.vocab_size))
    prefix = data.train[0].path
    made_with = corpus_tokenizer(prefix) if read_manifest(prefix) is not None else None
    if data.tokenizer is None:
        return made_with
    tokenizer = load_tokenizer(data.tokenizer)
    if made_with is not None and made_with.fingerprint != tokenizer.fingerprint:
        raise UserError(
            f"data.tokenizer = '{data.tokenizer}' is not the tokenizer that made {prefix}.bin; "
            "leave it out to use the corpus's own, or prepare the corpus again"
        )
    return tokenizer
