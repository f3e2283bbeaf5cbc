"""Check the memorization audit: score random documents on the grid and on one process, and compare the scores."""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fourfold.memorization.scorers import GridScorer
from fourfold.memorization.scores import FIELDS, AttackSampling
from fourfold.training.job import Job
from fourfold.verification.deviation import deviation
from fourfold.verification.one_process import Reference
from fourfold.verification.parity_report import Deviation

SAMPLING = AttackSampling(temperature=0.7)
"""How the simulated attacker samples tokens. Top-k and top-p are off, because a rounding error could move a token
across their cutoff."""

PREDICTED = FIELDS.index("predicted")


def audit_deviations(job: Job, references: list[Reference], amplification: float) -> list[Deviation]:
    """Score random documents of several lengths as an audit does, and compare the scores with the references. Every
    process must call this.

    Args:
        job: The job to audit.
        references: On rank 0, the same model on one process in float32 and in float64. Empty on other ranks.
        amplification: Factor by which the run amplifies rounding errors (see ``deviation.amplification``).

    Returns:
        On rank 0, the deviation of each field of the scores (see ``FIELDS``). Empty on other ranks.
    """
    documents = _documents(job)
    scored = GridScorer(job, SAMPLING).score(documents)
    if scored is None:
        return []
    logits_of_one, exact_logits = (
        [reference.next_token_logits(torch.from_numpy(tokens).to(job.device)) for tokens in documents]
        for reference in references
    )
    found: tuple[list[Tensor], ...] = ([], [], [])
    for tokens, fields, one_TV, exact_TV in zip(documents, scored, logits_of_one, exact_logits, strict=True):
        targets_T = torch.from_numpy(tokens[1:]).to(job.device)
        # A faulty audit may return too few scores. Pad them, so that parity reports a deviation instead of crashing.
        padded = F.pad(torch.from_numpy(fields), (0, len(targets_T)))
        of_grid = padded[:, : len(targets_T)].to(job.device, torch.float64)
        # Do not compare the ids of predicted tokens. If two tokens are almost equally likely, rounding decides which of
        # them is predicted. Compare the exact log-probability of the token that the grid predicted.
        predicted_T = of_grid[PREDICTED].long().clamp(max=exact_TV.shape[1] - 1)
        of_grid[PREDICTED] = exact_TV.log_softmax(1).gather(1, predicted_T[:, None])[:, 0]
        for parts, part in zip(found, (of_grid, _scores(one_TV, targets_T), _scores(exact_TV, targets_T)), strict=True):
            parts.append(part)
    fields_of_each = zip(FIELDS, *(torch.cat(parts, dim=1) for parts in found), strict=True)
    return [deviation(name, grid, one, exact, amplification) for name, grid, one, exact in fields_of_each]


def _documents(job: Job) -> list[NDArray[np.int64]]:
    """Return random documents. There are more of them than the grid can score in one pass. The shortest document has
    two tokens, and the longest document fills a whole window."""
    draw, longest = np.random.default_rng(job.run.training.seed), job.run.training.seq_length + 1
    count = job.run.training.micro_batch_size * job.grid.batch.size + 1
    lengths = [2, longest, *draw.integers(2, longest, max(0, count - 2), endpoint=True)]
    return [draw.integers(0, job.run.model.vocab_size, length) for length in lengths]


def _scores(logits_TV: Tensor, targets_T: Tensor) -> Tensor:
    """Compute the five score fields of each token from their definitions, [5, T]. In an audit, the field
    ``predicted`` is the id of the most likely token. Here, it is the log-probability of this token."""
    log_p_TV = logits_TV.log_softmax(1)
    mean_T = (log_p_TV.exp() * log_p_TV).sum(1)
    variance_T = (log_p_TV.exp() * (log_p_TV - mean_T[:, None]).square()).sum(1)
    sampled_TV = (logits_TV / SAMPLING.temperature).log_softmax(1)
    of_target, of_sampling = (each.gather(1, targets_T[:, None])[:, 0] for each in (log_p_TV, sampled_TV))
    return torch.stack([of_target, log_p_TV.amax(1), mean_T, variance_T, of_sampling])
