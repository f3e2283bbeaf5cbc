"""Rewrite the report of a run while it trains."""

import math
import sys
import time
from pathlib import Path

import torch.distributed as dist

from fourfold.config.run import RunConfig
from fourfold.data.tokenizer import Tokenizer
from fourfold.errors import UserError
from fourfold.reports.run_report import write_run_report
from fourfold.training.job import Job

SHORTEST_WAIT = 10.0
"""The report is written again after at least this many seconds."""
WAIT_PER_WRITING = 250
"""The time until the report is written again is at least this many times the time that the last writing took. So
writing takes about 0.4 % of the run's time at most, even if the run has many steps."""


class LiveReport:
    """A training callback that rewrites report.html on rank 0. In the browser, the page reloads itself until training
    ends."""

    def __init__(self, run: RunConfig, job: Job, tokenizer: Tokenizer | None, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._wait = SHORTEST_WAIT
        self._next = time.monotonic() + self._wait if dist.get_rank() == 0 else math.inf
        self._is_live = False
        """Whether the page in the folder reloads itself."""

    def after_step(self, steps: int) -> None:
        """Write the report again if enough time has passed since the last writing."""
        began = time.monotonic()
        if began >= self._next:
            self._write(math.ceil(self._wait))
            self._is_live = True
            ended = time.monotonic()
            self._wait = max(SHORTEST_WAIT, WAIT_PER_WRITING * (ended - began))
            self._next = ended + self._wait

    def close(self) -> None:
        """If this callback has written a page that reloads itself, replace the page by a report that does not."""
        if self._is_live:
            self._write(None)

    def _write(self, reload_seconds: int | None) -> None:
        """Write the report. If this fails, only print a warning, because training can continue."""
        try:
            write_run_report(self._run_dir, reload_seconds)
        except (UserError, OSError) as error:
            print(f"warning: the live report was not written: {error}", file=sys.stderr)
