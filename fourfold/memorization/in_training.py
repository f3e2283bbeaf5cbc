"""Audit the canaries during training. Each audit adds a line to memorization.jsonl in the run's folder, with the
results and the number of trained tokens."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fourfold.config.run import RunConfig
from fourfold.data.tokenizer import Tokenizer
from fourfold.memorization.documents import read_documents
from fourfold.memorization.extraction import Extraction, extraction, match_rate
from fourfold.memorization.scorers import GridScorer
from fourfold.memorization.scores import AttackSampling, TokenScores
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.training.job import Job
from fourfold.training.metrics import MEMORIZATION_FILE, add_record
from fourfold.training.validation_loss import is_last_step


class CanaryAudit:
    """A training callback. Every ``audit.interval`` steps, and after the last step, it scores all canaries in the file
    ``audit.documents`` (a list of canaries that ``fourfold prepare`` wrote).

    Every process of the job must call ``after_step``. Rank 0 writes the results. If a run resumes from a step, the
    lines of later steps are replaced.

    Raises:
        UserError: The file cannot be used.
    """

    def __init__(self, run: RunConfig, job: Job, tokenizer: Tokenizer | None, run_dir: Path) -> None:
        self.run, self.job, self.path = run, job, run_dir / MEMORIZATION_FILE
        self.scorer = GridScorer(job, AttackSampling())
        assert run.audit.documents is not None  # Without documents, this callback is not created.
        documents = read_documents(
            Path(run.audit.documents), tokenizer, vocab_size=run.model.vocab_size, shortest=run.audit.suffix + 1
        )
        self.documents = [document.cut(run.training.seq_length + 1) for document in documents]

    def after_step(self, steps: int) -> None:
        """Run the audit if one is due after this many steps."""
        if steps % self.run.audit.interval and not is_last_step(self.job.best, self.run, steps):
            return
        fields = self.scorer.score([document.tokens for document in self.documents])
        with failing_together():
            if fields is not None:
                self._write(steps, fields)

    def close(self) -> None:
        """Do nothing: no file is open."""

    def _write(self, steps: int, fields: list[NDArray[np.float32]]) -> None:
        scores = [TokenScores.of(d.tokens, each) for d, each in zip(self.documents, fields, strict=True)]
        training = self.run.training
        tokens = steps * training.global_batch_size * training.seq_length
        add_record(self.path, {"step": steps, "tokens": tokens, "by_count": self._by_count(scores)})

    def _by_count(self, scores: list[TokenScores]) -> dict[str, Any]:
        found = [extraction(each, self.run.audit.suffix) for each in scores]
        groups: dict[str, list[Extraction]] = {}
        for count in sorted({document.count for document in self.documents if document.count is not None}):
            groups[str(count)] = [each for each, d in zip(found, self.documents, strict=True) if d.count == count]
        return {name: _summary(group) for name, group in (groups or {"all": found}).items()}


def _summary(found: list[Extraction]) -> dict[str, Any]:
    return {
        **match_rate([each.exact_match for each in found]),
        "token_agreement": float(np.mean([each.token_agreement for each in found])),
        "loss": float(np.mean([each.loss for each in found])),
    }
