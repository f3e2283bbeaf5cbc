"""Compute the log-probabilities of the reference model for preference optimization (DPO).

The reference model is the model at the start of training. For each answer, DPO needs only one number from this model:
the answer's log-probability. These numbers are computed once, before the first step, and stored in a file. So no second
model takes memory, and a resumed run reads the same numbers on any grid.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from numpy.typing import NDArray

from fourfold.data.atomic_files import write_output
from fourfold.data.conversations import PreferencePairs
from fourfold.data.masks import LossMask, labels_of
from fourfold.errors import UserError
from fourfold.parallel.grid.communicate import all_reduce
from fourfold.parallel.grid.shared_failure import decided_by_rank_0, failing_together
from fourfold.parsing import parse_json
from fourfold.training.corpora import Corpora, make_loader, micro_batches
from fourfold.training.job import Job

REFERENCE_FILE = "reference.json"
MASKED_SAMPLES = 1024
"""The digest that reveals changed masks covers the labels of this number of answers. Reading these labels takes a
fraction of a second."""


def install_reference(job: Job, corpora: Corpora, run_dir: Path, checkpoint: Path | None) -> None:
    """Compute or load the reference log-probabilities of the run's pairs, and write them to the run's folder.

    Every process calls this.

    Args:
        job: The model on the grid.
        corpora: The run's training and validation data, which have the pairs.
        run_dir: Folder of the run.
        checkpoint: The checkpoint that the run resumes from. None at the start of a run, when the job's weights are
            the reference model.

    Raises:
        UserError: The run is resumed, and the file with the log-probabilities is missing or damaged, or was computed
            for other pairs or masks.
    """
    sources = corpora.pairs()
    digests = decided_by_rank_0(lambda: {_digest_key(s): digest_of(s, corpora.train.masks) for s in sources})
    if checkpoint is None:
        found = [reference_log_probabilities(job, source, corpora.train.masks) for source in sources]
    else:
        places = [run_dir / REFERENCE_FILE, checkpoint.resolve().parent.parent / REFERENCE_FILE]
        found = decided_by_rank_0(lambda: _read(places, sources, digests))
    for source, values in zip(sources, found, strict=True):
        source.reference = values
    with failing_together():
        if dist.get_rank() == 0:
            kept = {
                str(source.corpus.prefix): [None if np.isnan(value) else float(value) for value in values]
                for source, values in zip(sources, found, strict=True)
            }
            write_output(run_dir / REFERENCE_FILE, json.dumps(kept | digests))


@torch.no_grad()
def reference_log_probabilities(job: Job, source: PreferencePairs, masks: Sequence[LossMask]) -> NDArray[np.float32]:
    """Return the log-probability of each answer in a corpus of pairs, by the index of the answer's document. Answers of
    skipped pairs have NaN."""
    batch, batch_size = job.grid.batch, job.run.training.global_batch_size
    loader = make_loader(job.run, source, batch, masks, prefetch=False)
    documents = source.corpus.documents
    sums, counts = (torch.zeros(documents, dtype=torch.float64, device=job.device) for _ in range(2))
    for step in range(-(-len(source) // batch_size)):
        numbers = loader.sample_numbers(step).reshape(-1)
        mine = micro_batches(loader.assemble(numbers), job.run, job.grid.cp, job.device)
        outputs = job.outputs(mine)  # The list is empty on ranks without the last stage.
        if outputs:
            rows = torch.from_numpy(source.documents_of(numbers)).to(job.device)
            sums.index_add_(0, rows, torch.cat(outputs).double())
            counts.index_add_(0, rows, torch.ones_like(rows, dtype=torch.float64))
    for axis in (batch, job.grid.pp):
        sums, counts = (all_reduce(t, axis, "log-probabilities of the reference") for t in (sums, counts))
    # The last step may reach into the next epoch, and score some answers again. So take the mean of an answer's scores.
    return (sums / counts).float().cpu().numpy()


def digest_of(source: PreferencePairs, masks: Sequence[LossMask]) -> str:
    """Return a digest that changes if a corpus of pairs or the loss masks change.

    The digest covers all tokens, the mask of the answers, and the labels of about ``MASKED_SAMPLES`` answers.
    """
    digest = xxhash.xxh3_128()
    for corpus in (source.corpus, source.answers):
        digest.update(corpus.read(0, corpus.tokens).data)
    in_order = np.argsort(source.documents_of(np.arange(len(source))))
    # Chosen and rejected answers alternate, so an odd stride hits both kinds.
    spread = in_order[:: len(source) // MASKED_SAMPLES | 1]
    for first in range(0, len(spread), 32):
        digest.update(labels_of(source.read(spread[first : first + 32]), masks).data)
    return digest.hexdigest()


def _digest_key(source: PreferencePairs) -> str:
    return f"digest of {source.corpus.prefix}"


def _read(places: list[Path], sources: list[PreferencePairs], digests: dict[str, str]) -> list[NDArray[np.float32]]:
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        raise UserError(
            f"{places[0]} is missing, but a resumed run needs the log-probabilities of the reference in this file; "
            "restore the file, or start again with checkpoint.resume = 'never'"
        )
    try:
        kept = parse_json(path.read_text(encoding="utf-8"))
    except ValueError:
        raise UserError(f"{path} is damaged; start again with checkpoint.resume = 'never'") from None
    found = []
    for source in sources:
        values = kept.get(str(source.corpus.prefix)) if isinstance(kept, dict) else None
        # Answers of skipped pairs have None instead of a number.
        are_numbers = isinstance(values, list) and all(isinstance(value, float | int | None) for value in values)
        if not are_numbers or values is None or len(values) != source.corpus.documents:
            raise UserError(
                f"{path} has no log-probabilities of the {source.corpus.documents} answers of {source.corpus.prefix}; "
                "train on the pairs that the run started with, or start again with checkpoint.resume = 'never'"
            )
        # Files from earlier versions of fourfold have no digest, so accept a missing digest.
        if kept.get(_digest_key(source), digests[_digest_key(source)]) != digests[_digest_key(source)]:
            raise UserError(
                f"{path} was computed for other pairs than {source.corpus.prefix} has now, or with other [masks]; "
                "restore the pairs and [masks], or start again with checkpoint.resume = 'never'"
            )
        found.append(np.array(values, dtype=np.float32))
    return found
