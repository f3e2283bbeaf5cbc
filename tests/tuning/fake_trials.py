"""Make candidates for tests, and fake trials: they write the files that `fourfold train` would write, without
training."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.request import request_from_options
from fourfold.planning.search.space import SearchLimits
from fourfold.run_file.dump import to_toml
from fourfold.run_file.load import load_run
from fourfold.tuning.candidates import Candidates, candidates_of, search_candidates
from fourfold.tuning.trial_process import LOG
from fourfold.tuning.trial_run import RUN_FOLDER
from fourfold.tuning.tuner import Search, Settings, Subject

RUN = """
name = "tiny"
[model]
preset = "gpt-demo"
[data]
source = "python-stdlib"
[parallel]
dp = 8
[training]
global_batch_size = 64
seq_length = 512
train_steps = 100
precision = "bf16"
"""
LIMITS = SearchLimits(
    fixed=(("cp", 1), ("pp", (1, 2))),
    zeros=(0, 1),
    recomputes=((0, 1, False), (2, 1, False)),
    micro_batches=(1, 2, 4, 8),
    pipelines=(("1F1B", 1),),
    batch_parts=(1,),
)
MACHINE = load_machine("dgx-a100")


def request(folder: Path) -> Any:
    (folder / "run.toml").write_text(RUN)
    return request_from_options(run_file=folder / "run.toml", gpus=8)


def tiny_candidates(memory: float | None = None, folder: Path | None = None) -> Candidates:
    """Return layouts within ``LIMITS``. ``memory`` is in bytes of a device."""
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        base = request(folder or Path(temporary)).base
    machine = MACHINE if memory is None else replace(MACHINE, memory=memory)
    # Rule out no layout because of memory, as on a CPU. But let predictions be as uncertain as on a GPU.
    return replace(search_candidates(base, machine, prior_constants(), 8, LIMITS, on_gpu=False), doubt=1.0)


def true_seconds(candidates: Candidates, seed: int = 0, remainder: float = 0.08) -> np.ndarray:
    """Return the seconds [n] that layouts really take: predicted with other constants, times a remainder that belongs
    to no part."""
    draw = np.random.default_rng(seed)
    factors = {name: getattr(prior_constants(), name) * float(np.exp(draw.normal(0, 0.3)))
               for name in ("matmul", "intra", "latency", "launch", "exposed")}  # fmt: skip
    seconds = candidates_of(candidates.work, candidates.machine, replace(prior_constants(), **factors)).seconds
    return np.asarray(seconds * np.exp(draw.normal(0, remainder, candidates.count)))


@dataclass
class FakeTrial:
    """Stands for ``fourfold train``, with its files and exit code. ``what``: done, crash, hang, killed, refused, or
    grows."""

    run_file: Path
    folder: Path
    what: str
    seconds: float
    ended: bool = False
    polls: int = field(default=0)

    def has_started(self) -> bool:
        """Return whether the trial has started. A hanging trial starts at once. Every other trial starts only when it
        ends, so no time limit can end it early on a busy machine."""
        return self.what == "hang" or self.polls > 0

    def exit_code(self) -> int | None:
        self.polls += 1
        if self.ended or self.polls == 1:
            return None
        return self._exit()

    def end(self) -> None:
        self.ended = True

    def _exit(self) -> int | None:
        if self.what == "hang":
            return None
        if self.what == "grows":
            write_metrics(self.run_file, self.folder, self.seconds, peak=2e9 * self.polls)
            return None
        if self.what == "done":
            write_metrics(self.run_file, self.folder, self.seconds)
            return 0
        words = {"crash": "RuntimeError: the pump is broken", "refused": "fourfold: no such layout",
                 "out": "torch.OutOfMemoryError: CUDA out of memory", "killed": "ended by SIGKILL"}  # fmt: skip
        (self.folder / LOG).write_text(f"some lines\n{words[self.what]}\n")
        return {"crash": 1, "refused": 2, "out": 1, "killed": -signal.SIGKILL}[self.what]


def write_metrics(run_file: Path, folder: Path, seconds: float, peak: float = 3e8) -> None:
    """Write the folder of a run that took all its steps, each in ``seconds``."""
    run, out = load_run(run_file), folder / RUN_FOLDER
    out.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step + 1, "step_seconds": seconds, "peak_memory_bytes": peak})
             for step in range(run.training.train_steps)]  # fmt: skip
    (out / "run.toml").write_text(to_toml(run))
    (out / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def fake_search(
    folder: Path,
    what_of: Callable[[int], str] = lambda index: "done",
    report: Callable[[str], None] = lambda line: None,
    memory: float | None = None,
    seed: int = 0,
    **settings: Any,
) -> tuple[Search, list[int]]:
    """Return a search whose trials are fakes, and the candidates that it tries, in order."""
    folder.mkdir(exist_ok=True)
    candidates = tiny_candidates(memory, folder)
    subject = Subject(request(folder), candidates, prior_constants(), on_gpu=False)
    truth, tried = true_seconds(candidates, seed), []

    def start(run_file: Path, trial: Path, slot: int) -> FakeTrial:
        run = load_run(run_file)
        grid, training = run.parallel, run.training
        knobs = {"x": grid.x, "y": grid.y, "z": grid.z, "dp": grid.dp, "pp": grid.pp, "zero": grid.zero,
                 "micro_batch_size": training.micro_batch_size,
                 "recompute": 2 if run.activation_checkpoint.mode == "full" else 0}  # fmt: skip
        (index,) = np.flatnonzero(np.all([candidates.knobs[name] == value for name, value in knobs.items()], axis=0))
        tried.append(int(index))
        return FakeTrial(run_file, trial, what_of(int(index)), float(truth[index]))

    search = Search(subject, Settings(**{"trials": 8, "timeout": 0.5, **settings}), folder, start, report)
    return search, tried
