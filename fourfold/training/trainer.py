"""Train a model, from the run file to the last checkpoint. Read this file from top to bottom:

    prepare      open the run's folder and its data, put the model on the grid, load or initialize its weights
    train_step   batch → loss and gradients → clip → check → update
    after_step   validate → record → go back after a bad step → callbacks → save
    finish       wait for the last save, sample text, write the summary

Every process of a job runs this file. Only rank 0 has a ``RunRecord``, which prints and writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from fourfold.checkpoints.checkpoint import Checkpointer, load_newest
from fourfold.checkpoints.disk_space import check_room_at_start
from fourfold.checkpoints.find_checkpoints import FOLDER as CHECKPOINTS
from fourfold.checkpoints.find_checkpoints import find_checkpoint
from fourfold.checkpoints.leftover_checkpoints import set_later_aside, tidy
from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import writing
from fourfold.data.tokenizer import Tokenizer
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.heartbeat import begin_step
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.huggingface.import_model import load_pretrained
from fourfold.huggingface.model_folder import SMALL_FILES, SOURCE_FOLDER, keep_small_files
from fourfold.huggingface.tokenizer_file import check_same_tokenizer
from fourfold.launch.job_processes import choose_device
from fourfold.launch.stop_signals import StopRequest, stop_request
from fourfold.launch.watchdog import watchdog
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.shared_failure import decided_by_rank_0, failing_together, raise_together, true_on_any_rank
from fourfold.parallel.tensor.float8 import require_float8
from fourfold.training.attempts import note_end, note_start
from fourfold.training.corpora import Corpora, micro_batches, open_corpora
from fourfold.training.job import Job, StepResult
from fourfold.training.outcome import Outcome
from fourfold.training.reference_model import install_reference
from fourfold.training.replay import Replay
from fourfold.training.resume_warnings import warn_of_changes
from fourfold.training.run_folder import folder_of, open_run_folder
from fourfold.training.run_record import RunRecord
from fourfold.training.sample import sample_text
from fourfold.training.step_checks import LEFT_OUT, SharedFigures, StepChecks, Verdict, figures_of_all_ranks
from fourfold.training.streaming import continue_stream, stream_position
from fourfold.training.validation_loss import is_exhausted, is_last_step, note_validation, validate

HANGS = "hangs"
"""Subfolder of a run's folder. It has a folder for each attempt that hung, named by the time when the attempt
started."""


class Callback(Protocol):
    """An object that every process calls after each step, for example to evaluate the model."""

    def after_step(self, steps: int) -> None:
        """Do the callback's work after a step. This method may run collectives and forward passes. The trainer does not
        call it after a step that is rolled back.

        Args:
            steps: Number of steps taken since the start of the run.
        """

    def close(self) -> None:
        """Clean up. This is called once at the end, even if training failed."""


CallbackMaker = Callable[[RunConfig, Job, Tokenizer | None, Path], Callback]
"""A function that creates a callback before the first step. It receives the run, the job, the tokenizer (or None), and
the run's folder."""


@dataclass(frozen=True)
class TakenStep:
    """The results of one step, after its update was applied or skipped."""

    number: int
    """Index of the step. The first step is 0."""
    figures: SharedFigures
    verdict: Verdict
    is_updated: bool
    """False if the weights are unchanged: the step was bad, its batch was left out, or its fp16 gradients
    overflowed."""
    extra_metrics: dict[str, float]
    """The metrics of preference training ([dpo]), or the loss of multi-token prediction. Empty for other runs."""
    seconds: float


def train(place: Place, run: RunConfig, callbacks: Sequence[CallbackMaker] = ()) -> Outcome:
    """Train a run. Every process of the job calls this.

    Args:
        place: The rank of this process, and the size of the job.
        run: The run's settings. ``checkpoint.resume`` selects the checkpoint that the run resumes from.
        callbacks: Functions that create the callbacks. After each step, the callbacks run in the order of this list.

    Returns:
        The outcome of the job on this process.

    Raises:
        UserError: The run cannot start, cannot save, or diverges. Or computing a step twice gave different results.
    """
    if run.lora.rank and run.model.from_hf is None:
        raise UserError(f"lora.rank = {run.lora.rank} needs a model to adapt; name one in model.from_hf")
    limits, launched = run.fault_tolerance, place.launcher != "local"
    seconds = 60 * limits.max_wall_time
    with stop_request(announce=place.rank == 0, launched=launched, seconds=seconds) as stop, ExitStack() as stack:
        started = decided_by_rank_0(lambda: time.strftime("%Y-%m-%dT%H-%M-%S"))
        stack.enter_context(watchdog(folder_of(run) / HANGS / started, place, limits))
        trainer = prepare(place, run, callbacks, stop, stack)
        while trainer.has_next_step():
            trainer.after_step(trainer.train_step())
        return trainer.finish()


def prepare(
    place: Place, run: RunConfig, callbacks: Sequence[CallbackMaker], stop: StopRequest, stack: ExitStack
) -> Trainer:
    """Build everything that the first step needs.

    Args:
        place: The rank of this process, and the size of the job.
        run: The run's settings.
        callbacks: Functions that create the callbacks.
        stop: Says whether the job has been asked to stop.
        stack: Receives everything that must be closed at the end of the run.
    """
    device = choose_device(place, run.training.device)
    if run.training.float8 != "none":
        require_float8(device)
    run_dir = folder_of(run)
    is_new = not run_dir.is_dir()
    checkpoint = decided_by_rank_0(lambda: _find_start(run, run_dir, stack))

    grid = Grid(run.parallel, device.type)
    corpora = open_corpora(run, grid.batch)
    stack.callback(corpora.close)
    job = Job(run, grid, device)
    checkpoint, first_step = _fill_weights(job, corpora, checkpoint)
    continue_stream(corpora, checkpoint, first_step)

    made = [make(run, job, corpora.tokenizer, run_dir) for make in callbacks]
    for callback in made:
        stack.callback(callback.close)
    record: RunRecord | None = None
    with failing_together():
        if dist.get_rank() == 0:
            if is_new:
                stack.enter_context(open_run_folder(run_dir))
            note_start(run_dir, place.restarts, run, first_step)
            if first_step < run.training.train_steps:
                check_room_at_start(run_dir / CHECKPOINTS, run)
            record = stack.enter_context(RunRecord(run, run_dir, job, corpora, first_step, place))
            if first_step < run.training.train_steps:
                with writing(run_dir / CHECKPOINTS):
                    set_later_aside(run_dir / CHECKPOINTS, first_step)
            if checkpoint is not None:
                warn_of_changes(corpora, checkpoint, run)
            _keep_source_files(run, run_dir)
    if run.dpo.beta:
        install_reference(job, corpora, run_dir, checkpoint if first_step else None)
    position = partial(stream_position, corpora)
    checkpointer = Checkpointer(run_dir / CHECKPOINTS, job, run.checkpoint, position, corpora.first_samples)
    if first_step:
        checkpointer.newest = checkpoint
    checks, replay = StepChecks(run_dir, job, checkpointer), Replay(job, partial(checkpointer.wait, required=False))
    return Trainer(
        run, run_dir, job, corpora, made, record, checkpointer, checks, replay, stop,
        steps=first_step,
        # A stop signal may have arrived while the run was prepared.
        stopped=true_on_any_rank(stop.is_set, device, "stop signal"),
    )  # fmt: skip


@dataclass
class Trainer:
    """The training loop of a run: its components, and how far it has come."""

    run: RunConfig
    run_dir: Path
    job: Job
    corpora: Corpora
    callbacks: Sequence[Callback]
    record: RunRecord | None
    """Prints and writes the run's record. None on all ranks except 0."""
    checkpointer: Checkpointer
    checks: StepChecks
    replay: Replay
    stop: StopRequest
    steps: int
    """Number of steps taken since the start of the run. A return to a checkpoint lowers this number."""
    stopped: bool = False
    """Whether a signal or the time limit asks the run to stop. All ranks stop after the same step."""
    last_loss: float | None = None
    """The loss of the last step of this attempt that passed the checks. None if no step has passed them."""

    def has_next_step(self) -> bool:
        """Return False if all steps are taken or the run should stop early."""
        is_done = self.steps >= self.run.training.train_steps or is_exhausted(self.job.best, self.run.validation)
        return not is_done and not self.stopped

    def train_step(self) -> TakenStep:
        """Take the next step: batch → loss and gradients → clip → check → update."""
        run, job, step = self.run, self.job, self.steps
        begin_step(step)
        started = time.perf_counter()
        # Leave out the batch if bad_steps.jsonl says so, after a rollback or after repeated failures of the step.
        is_left_out = self.checks.leaves_out(step)
        if is_left_out:
            result = StepResult.none(job.device)
        else:
            batches = micro_batches(self.corpora.train.step(step), run, job.grid.cp, job.device)
            # The loss is a mean over the tokens of all ranks, so count these tokens first.
            kept = job.count_kept(batches)
            loss = self.replay.forward_backward(step, batches, kept)
            # Leave the time of the replay check out of the step's time.
            started += self.replay.seconds
            result = StepResult(loss, job.clip(), kept)
        failure = None if self.record is None else self.record.failure
        # The host waits for the GPU here, and nowhere else in an ordinary step.
        figures = figures_of_all_ranks(result, self.stop.is_set, failure is not None)
        if figures.failed:
            self.checkpointer.wait(required=False)
            raise_together(failure)
        self.stopped = figures.stopped
        verdict = LEFT_OUT if is_left_out else self.checks.judge(step, figures)
        if verdict.action == "update":
            # Update the weights, unless fp16 gradients overflowed.
            is_updated = job.update(step, figures.grad_norm)
            self.last_loss = figures.loss
        else:
            is_updated = job.skip_update()
        extra = job.take_preferences() if job.later_losses is None else job.later_losses.take()
        self.steps = step + 1
        return TakenStep(step, figures, verdict, is_updated, extra, time.perf_counter() - started)

    def after_step(self, taken: TakenStep) -> None:
        """Validate, and record the step. Then act on the step's verdict: stop with an error, or roll back, or call the
        callbacks and save a checkpoint if one is due.

        Raises:
            UserError: The step's verdict is to stop, or a required save failed.
        """
        run, job, steps = self.run, self.job, self.steps
        validation = validate(job, self.corpora) if _is_due(steps, run.validation.interval) else {}
        judged = validation.get("ema_validation_loss", validation.get("validation_loss"))
        is_best = judged is not None and note_validation(job.best, run.validation, steps, judged)
        if self.record is not None:
            more = {**taken.extra_metrics, **validation, **({} if taken.is_updated else {"skipped": True})}
            self.record.step(taken.number, taken.figures, taken.seconds, more)
        if taken.verdict.action == "stop":
            raise UserError(taken.verdict.reason)
        if taken.verdict.action == "roll_back":
            self._roll_back()
            return
        for callback in self.callbacks:
            callback.after_step(steps)
        ends = self.stopped or (is_last_step(job.best, run, steps) and run.checkpoint.save_last)
        if _is_due(steps, run.checkpoint.interval) or ends or (is_best and run.validation.keep_best):
            self.checkpointer.save(steps, required=ends, prune=taken.verdict.action == "update")
        self.checkpointer.poll()

    def finish(self) -> Outcome:
        """Wait for the last save, sample text if the run file asks for it, and write the summary."""
        run, tokenizer = self.run, self.corpora.tokenizer
        self.checkpointer.wait()
        sample = None
        if run.sample.prompt is not None and tokenizer is not None and not self.stopped:
            sample = sample_text(self.job, run.sample.prompt, tokenizer)
        saved = self.checkpointer.newest
        if saved is not None and saved.parent.resolve() != (self.run_dir / CHECKPOINTS).resolve():
            # This checkpoint is from another folder, which the run resumed from. The run itself has saved nothing.
            saved = None
        outcome = Outcome(
            run_dir=str(self.run_dir), steps=self.steps, loss=self.last_loss, sample=sample, stopped=self.stopped,
            checkpoint=None if saved is None else str(saved), is_first_process=self.record is not None,
        )  # fmt: skip
        with failing_together():
            if self.record is not None:
                self.record.end(outcome)
                note_end(self.run_dir)
        return outcome

    def _roll_back(self) -> None:
        """Go back to the newest checkpoint. The data continues at the checkpoint's step, and the metrics of later steps
        are removed."""
        self.steps = self.checks.roll_back()
        continue_stream(self.corpora, self.checkpointer.newest, self.steps)
        with failing_together():
            if self.record is not None:
                self.record.go_back(self.steps)


def _find_start(run: RunConfig, run_dir: Path, stack: ExitStack) -> Path | None:
    """Return the checkpoint to resume from, or None. If the run folder exists, lock it until ``stack`` is closed."""
    if run_dir.is_dir():
        stack.enter_context(open_run_folder(run_dir))
        with writing(run_dir / CHECKPOINTS):
            tidy(run_dir / CHECKPOINTS)
    return find_checkpoint(run.checkpoint.resume, run_dir / CHECKPOINTS)


def _fill_weights(job: Job, corpora: Corpora, checkpoint: Path | None) -> tuple[Path | None, int]:
    """Fill the weights from the checkpoint, from a pretrained model, or from the seed.

    Returns:
        The checkpoint that was loaded, and its number of finished steps. (None, 0) if no checkpoint was given. If the
        given checkpoint was damaged, another one was loaded.
    """
    run = job.run
    if run.model.from_hf is not None:
        check_same_tokenizer(run.model.from_hf, corpora.tokenizer)
    if checkpoint is None or run.lora.rank:  # With LoRA, checkpoints lack the frozen weights.
        if run.model.from_hf is not None:
            load_pretrained(job, run.model.from_hf)
        else:
            job.initialize(run.training.seed)
    if checkpoint is None:
        return None, 0
    return load_newest(checkpoint, job, run.checkpoint.resume == "auto")


def _keep_source_files(run: RunConfig, run_dir: Path) -> None:
    """Copy the pretrained model's tokenizer and configuration, so that ``export-hf`` can write them with the trained
    weights."""
    if run.model.from_hf is not None:
        with writing(run_dir / SOURCE_FOLDER):
            keep_small_files(local_folder(run.model.from_hf, SMALL_FILES), run_dir / SOURCE_FOLDER)


def _is_due(steps: int, interval: int) -> bool:
    return interval > 0 and steps % interval == 0
