"""The training job from the run file to the last checkpoint, top to bottom."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.checkpoints.find import find_checkpoint
from fourfold.config.run import RunConfig
from fourfold.data.files import write_whole
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.huggingface.convert import (
    PATTERNS,
    SOURCE_FOLDER,
    check_same_tokenizer,
    keep_small_files,
    load_pretrained,
)
from fourfold.launch.job_processes import device_of, imported
from fourfold.models.dtypes import DTYPES
from fourfold.models.lora import adapter_shapes
from fourfold.parallel.communicate import purpose
from fourfold.parallel.float8 import require_float8
from fourfold.parallel.grid import Grid
from fourfold.run_file.dump import to_toml
from fourfold.training.console import Progress
from fourfold.training.corpora import Corpora, micro_batches, open_corpora
from fourfold.training.flops import (
    FLOP_FORMULA,
    FlopCount,
    flops_per_token,
    mfu,
    model_tflops_per_device,
    peak_flops,
)
from fourfold.training.job import Job, StepResult
from fourfold.training.metrics import MetricsWriter, StepMetrics, peak_memory_bytes
from fourfold.training.prediction import Forecast
from fourfold.training.sample import sample_text

SAMPLE_FILE, SUMMARY_FILE, RUN_FILE = "sample.txt", "summary.json", "run.toml"


@dataclass(frozen=True)
class Outcome:
    """How a job ended. checkpoint: the last one written or found; stopped: a signal ended it before its last step."""

    run_dir: str
    steps: int
    loss: float | None
    checkpoint: str | None
    sample: str | None
    stopped: bool
    is_first_process: bool


class Callback(Protocol):
    """Something that every process does besides training. Made with (run, job, tokenizer or None, run_dir)."""

    def after_step(self, steps: int) -> None:
        """Called after every optimizer step; ``steps`` counts those taken. It may run collectives and forwards."""
        ...


def train(place: Place, run: RunConfig, callbacks: Sequence[str] = ()) -> Outcome:
    """Train as the run file says, on every process of the job; resumes where ``checkpoint.resume`` points.

    callbacks: ``"package.module:name"`` of each ``Callback``, strings so that the loop need not know them.
    """
    if run.lora.rank and run.model.from_hf is None:
        raise UserError("lora trains additions to a model that stays as it is; name that model in model.from_hf")
    device = device_of(place, run.training.device)
    if run.training.float8 != "none":
        require_float8(device)
    run_dir = Path(run.output_dir) / run.name
    checkpoint = find_checkpoint(run.checkpoint.resume, run_dir / "checkpoints")

    grid = Grid(run.parallel, device.type)
    corpora = open_corpora(run, grid.batch)
    if run.model.from_hf is not None:
        check_same_tokenizer(run.model.from_hf, corpora.tokenizer)
    job = Job(run, grid, device)
    first_step = 0
    if checkpoint is None or run.lora.rank:  # a checkpoint of LoRA has only the adapters
        _first_weights(job)
    if checkpoint is not None:
        first_step = load_checkpoint(checkpoint, job)

    with ExitStack() as stack:
        stack.callback(corpora.train.close)
        besides: list[Callback] = [imported(name)(run, job, corpora.tokenizer, run_dir) for name in callbacks]
        is_first = dist.get_rank() == 0
        if is_first:
            _make_folder(run_dir)
            stack.enter_context(_only_job_in(run_dir))
        record = stack.enter_context(Record(run, run_dir, job, corpora, first_step)) if is_first else None
        if is_first:
            write_whole(run_dir / RUN_FILE, to_toml(run).encode())
            if run.model.from_hf is not None:
                keep_small_files(local_folder(run.model.from_hf, PATTERNS), run_dir / SOURCE_FOLDER)
        checkpointer = Checkpointer(run_dir / "checkpoints", job, run.checkpoint)
        stop = stack.enter_context(_stop_signal())
        stopped, step, result = False, first_step, None

        for step in range(first_step, run.training.train_steps):
            started = time.perf_counter()
            result = job.train_step(micro_batches(corpora.train.step(step), run, grid.cp, device), step)
            result.loss.item()  # waits for the device
            seconds = time.perf_counter() - started
            validation_loss = _validate(job, corpora, step) if _due(step, run.validation.interval) else None
            if record is not None:
                record.step(step, result, seconds, validation_loss)
            _check_finite(result, step, run_dir)  # before a checkpoint is written
            for callback in besides:
                callback.after_step(step + 1)
            stopped = _any_rank(stop.is_set, device)
            last = step + 1 == run.training.train_steps
            if _due(step, run.checkpoint.interval) or stopped or (last and run.checkpoint.save_last):
                checkpointer.save(step + 1)
            checkpointer.poll()
            if stopped:
                break
        checkpointer.wait()

        done = first_step if result is None else step + 1
        sample = None
        if run.sample.prompt is not None and corpora.tokenizer is not None and not stopped:
            sample = sample_text(job, corpora.tokenizer)
        saved = find_checkpoint("auto", run_dir / "checkpoints")
        outcome = Outcome(
            run_dir=str(run_dir),
            steps=done,
            loss=None if result is None else result.loss.item(),
            checkpoint=str(saved) if saved is not None else None,
            sample=sample,
            stopped=stopped,
            is_first_process=is_first,
        )
        if record is not None:
            record.end(outcome)
        return outcome


def _first_weights(job: Job) -> None:
    """Those of a pretrained model, or drawn from the seed."""
    if job.run.model.from_hf is not None:
        load_pretrained(job, job.run.model.from_hf)
    else:
        job.initialize(job.run.training.seed)


class Record:
    """What rank 0 shows and writes down."""

    def __init__(self, run: RunConfig, run_dir: Path, job: Job, corpora: Corpora, first_step: int) -> None:
        self.run, self.run_dir, self.job = run, run_dir, job
        training, model = run.training, run.model
        self.tokens_per_step = training.global_batch_size * training.seq_length
        self.flops: FlopCount = flops_per_token(model, training.seq_length, frozen=run.lora.rank > 0)
        on_gpu = job.device.type == "cuda"
        name = torch.cuda.get_device_name(job.device) if on_gpu else "CPU"
        self.peak = peak_flops(name, DTYPES[training.precision]) if on_gpu else None
        self.writer = MetricsWriter(run_dir, run.metrics.tensorboard, resume_step=first_step)
        total_tokens = training.train_steps * self.tokens_per_step
        self.progress = Progress(training.train_steps, total_tokens, log_interval=run.metrics.log_interval)
        self.facts = {
            "run": run.name,
            "parameters": model.num_parameters,
            **({"LoRA": _adapters(run)} if run.lora.rank else {}),
            "grid": f"{run.parallel.describe()} ({run.parallel.world_size} × {name})",
            "batch": f"{training.global_batch_size} sequences = {self.tokens_per_step:,} tokens a step, "
            f"gradient_accumulation_steps {run.gradient_accumulation_steps}",
            "tokens": total_tokens,
            "model FLOPs per token": self.flops.training,
            "FLOP formula": FLOP_FORMULA,
            "peak": "n/a: no published figure for this device, so no MFU" if self.peak is None else self.peak.source,
            "starts at step": first_step,
        }
        for packed in corpora.packing():
            self.facts["conversations"] = (
                f"{packed.conversations:,} in {packed.windows:,} sequences, {packed.filled:.1%} filled; "
                f"{corpora.trained_share():.1%} of the tokens trained"
            )
            if packed.cut or packed.left_out:
                print(
                    f"warning: training.seq_length = {training.seq_length} cuts the end of {packed.cut:,} "
                    f"conversations and leaves out {packed.left_out:,}, whose answers begin beyond it",
                    file=sys.stderr,
                )
        masked = corpora.goldfish_statistics()
        if masked is not None:
            goldfish = run.masks.goldfish
            self.facts["goldfish mask"] = (
                f"{goldfish.strategy}, k {goldfish.k}, h {goldfish.h}, from step {goldfish.start_step} on: "
                f"{masked.drop_rate:.1%} not trained, at most {masked.longest_undropped_span} kept in a row"
            )
        self.forecast = Forecast(run, run_dir, on_gpu)
        self.progress.start_summary(self.facts)
        for warning in masked.warnings() if masked is not None else []:
            print(f"warning: {warning}", file=sys.stderr)
        self.started = time.perf_counter()
        self.first_step = first_step

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.close()
        self.writer.close()

    def step(self, step: int, result: StepResult, seconds: float, validation_loss: float | None) -> None:
        per_second = self.tokens_per_step / seconds
        tflops = model_tflops_per_device(self.flops.training, per_second, self.run.parallel.world_size)
        metrics = StepMetrics(
            step=step + 1,
            loss=result.loss.item(),
            grad_norm=result.grad_norm.item(),
            lr=self.job.learning_rate(step),
            tokens=(step + 1) * self.tokens_per_step,
            tokens_per_second=per_second,
            model_tflops_per_device=tflops,
            mfu=mfu(tflops, self.peak),
            peak_memory_bytes=peak_memory_bytes(self.job.device),
            step_seconds=seconds,
            trained_token_share=result.kept_tokens.item() / self.tokens_per_step,
            validation_loss=validation_loss,
        )
        self.writer.write(metrics)
        self.progress.update(metrics)
        if (compared := self.forecast.after_step(metrics)) is not None:
            self.progress.note("Predicted and measured", compared)

    def end(self, outcome: Outcome) -> None:
        seconds = time.perf_counter() - self.started
        steps = outcome.steps - self.first_step
        facts = {
            "steps": outcome.steps,
            "final loss": outcome.loss,
            "tokens/s, everything included": steps * self.tokens_per_step / seconds if steps else None,
            "seconds": round(seconds, 1),
            "checkpoint": outcome.checkpoint,
            "ended by": "a signal, after saving" if outcome.stopped else "the last step",
        }
        if steps:  # a run that was finished already keeps the summary of its last steps
            write_whole(self.run_dir / SUMMARY_FILE, json.dumps({**self.facts, **facts}, indent=1).encode())
        if outcome.sample is not None:
            write_whole(self.run_dir / SAMPLE_FILE, outcome.sample.encode())
        self.progress.end_summary(facts)


def _adapters(run: RunConfig) -> str:
    trained = sum(math.prod(shape) for shape in adapter_shapes(run.model, run.lora).values())
    return f"rank {run.lora.rank}, {trained:,} parameters trained ({trained / run.model.num_parameters:.2%})"


def _make_folder(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder of the run, {run_dir}: {error.strerror}") from None


@contextmanager
def _only_job_in(run_dir: Path) -> Iterator[None]:
    """Raise ``UserError`` when another job of this machine writes to the folder of the run.

    The lock goes with the process, however it ends. File systems without locks do without.
    """
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(folder)
        raise UserError(f"another job is training in {run_dir}; wait for it, or change the run's name") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    try:
        yield
    finally:
        os.close(folder)


def _check_finite(result: StepResult, step: int, run_dir: Path) -> None:
    """Raise ``UserError`` after a step that no training recovers from: NaN gradients have made all weights NaN."""
    if result.kept_tokens.item() == 0:
        raise UserError(
            f"step {step + 1} has no token to learn: every document of its sequences is one token long, or its masks "
            "keep none"
        )
    for what, value in (("loss", result.loss), ("gradient norm", result.grad_norm)):
        if result.skipped:  # the loss scale was too large, and has been halved
            continue
        if not math.isfinite(value.item()):
            raise UserError(
                f"the {what} is {value.item()} at step {step + 1}; lower optimizer.lr or lengthen "
                f"lr_scheduler.warmup_steps, and resume from the last checkpoint in {run_dir / 'checkpoints'}"
            )


def _validate(job: Job, corpora: Corpora, step: int) -> float | None:
    """Mean loss over the same ``validation.steps`` batches every time."""
    if corpora.validation is None:
        return None
    batches = [b for i in range(job.run.validation.steps) for b in corpora.validation.step(i)]
    return job.evaluate(micro_batches(batches, job.run, job.grid.cp, job.device)).item()


def _due(step: int, interval: int) -> bool:
    return interval > 0 and (step + 1) % interval == 0


def _any_rank(flag: bool, device: torch.device) -> bool:
    """Signals reach processes at different moments; all must leave the loop after the same step."""
    flags = torch.tensor(float(flag), device=device)
    with purpose("stop signal"):
        dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


@dataclass
class _Flag:
    is_set: bool = False


@contextmanager
def _stop_signal() -> Iterator[_Flag]:
    """SIGTERM and SIGUSR1 (what schedulers send before the end of the wall time) ask to save and stop."""
    flag = _Flag()

    def note(signum: int, frame: object) -> None:
        flag.is_set = True

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
