"""Train: the whole job from the run file to the last checkpoint, top to bottom."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from fourfold.checkpoints.checkpoint import Checkpointer, load_newest
from fourfold.checkpoints.disk_space import check_room_at_start
from fourfold.checkpoints.find import FOLDER as CHECKPOINTS
from fourfold.checkpoints.find import find_checkpoint
from fourfold.checkpoints.leftover_checkpoints import tidy
from fourfold.config.run import RunConfig
from fourfold.data.files import writing
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.heartbeat import begin_step
from fourfold.huggingface.architectures.config_json import local_folder
from fourfold.huggingface.import_model import load_pretrained
from fourfold.huggingface.model_folder import SMALL_FILES, SOURCE_FOLDER, keep_small_files
from fourfold.huggingface.tokenizer_file import check_same_tokenizer
from fourfold.launch.job_processes import device_of, imported
from fourfold.launch.stop_signals import StopRequest
from fourfold.parallel.grid.communicate import purpose
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid.shared_failure import decided_by_rank_0, failing_together, raise_together
from fourfold.parallel.tensor.float8 import require_float8
from fourfold.training.attempts import note_end, note_start
from fourfold.training.best_validation import is_exhausted, is_last_step, note_validation
from fourfold.training.corpora import Corpora, micro_batches, open_corpora
from fourfold.training.job import Job, StepResult
from fourfold.training.outcome import Outcome
from fourfold.training.reference_model import install_reference
from fourfold.training.replay import Replay
from fourfold.training.resume_warnings import warn_of_changes
from fourfold.training.run_folder import folder_of, open_run_folder
from fourfold.training.run_record import RunRecord
from fourfold.training.sample import sample_text
from fourfold.training.step_checks import LEFT_OUT, StepChecks, figures_of_all_ranks
from fourfold.training.streaming import continue_stream, stream_position
from fourfold.training.supervision import supervised


class Callback(Protocol):
    """Work that every process does after each step. Made with (run, job, tokenizer or None, run_dir)."""

    def after_step(self, steps: int) -> None:
        """Called after every optimizer step; ``steps`` counts those taken. It may run collectives and forwards."""
        ...

    def close(self) -> None:
        """Called at the end, whatever ended the training."""
        ...


def train(place: Place, run: RunConfig, callbacks: Sequence[str] = ()) -> Outcome:
    """Train the run on every process of the job; resumes where ``checkpoint.resume`` points.

    callbacks: ``"package.module:name"`` of each ``Callback``, strings so that the loop need not know them.
    """
    if run.lora.rank and run.model.from_hf is None:
        raise UserError("lora trains adapters for a frozen model; name that model in model.from_hf")
    with supervised(place, run) as stop:
        return _train(place, run, callbacks, stop)


def _train(place: Place, run: RunConfig, callbacks: Sequence[str], stop: StopRequest) -> Outcome:
    device = device_of(place, run.training.device)
    if run.training.float8 != "none":
        require_float8(device)
    run_dir = folder_of(run)
    was_there, is_first_process = run_dir.is_dir(), dist.get_rank() == 0

    with ExitStack() as stack:
        checkpoint = decided_by_rank_0(lambda: _checkpoint_of(run, run_dir, stack))
        grid = Grid(run.parallel, device.type)
        corpora = open_corpora(run, grid.batch)
        stack.callback(corpora.close)
        job = Job(run, grid, device)
        checkpoint, first_step = _fill(job, corpora, checkpoint)
        continue_stream(corpora, checkpoint, first_step)

        after_step: list[Callback] = [imported(name)(run, job, corpora.tokenizer, run_dir) for name in callbacks]
        for callback in after_step:
            stack.callback(callback.close)
        record: RunRecord | None = None
        with failing_together():
            if is_first_process:
                if not was_there:
                    stack.enter_context(open_run_folder(run_dir))
                note_start(run_dir, place.restarts, run, first_step)
                if first_step < run.training.train_steps:
                    check_room_at_start(run_dir / CHECKPOINTS, run)
                record = stack.enter_context(RunRecord(run, run_dir, job, corpora, first_step, place))
                if checkpoint is not None:
                    warn_of_changes(corpora, checkpoint, run)
                if run.model.from_hf is not None:
                    with writing(run_dir / SOURCE_FOLDER):
                        keep_small_files(local_folder(run.model.from_hf, SMALL_FILES), run_dir / SOURCE_FOLDER)
        if run.dpo.beta:
            install_reference(job, corpora, run_dir, checkpoint if first_step else None)
        checkpointer = Checkpointer(
            run_dir / CHECKPOINTS, job, run.checkpoint,
            lambda steps: stream_position(corpora, steps), corpora.first_samples,
        )  # fmt: skip
        if first_step:
            checkpointer.newest = checkpoint
        checks, replay = StepChecks(run_dir, job, checkpointer), Replay(job)
        steps, last_loss = first_step, None
        stopped = _on_any_rank(stop.is_set, device)  # while everything above was made ready

        while steps < run.training.train_steps and not stopped and not is_exhausted(job.best, run.validation):
            begin_step(steps)
            step, started = steps, time.perf_counter()
            is_left_out = checks.leaves_out(step)  # the run went back from it, or failed in it again and again
            if is_left_out:
                result = StepResult.none(device)
            else:
                batches = micro_batches(corpora.train.step(step), run, grid.cp, device)
                kept = job.count_kept(batches)  # tokens of the step, over all ranks: the divisor of the summed losses
                loss = replay.forward_backward(step, batches, kept)  # of every micro-batch; gradients summed over ranks
                result = StepResult(loss, job.clip(), kept)
            failure = None if record is None else record.failure
            figures = figures_of_all_ranks(result, stop.is_set, failure is not None)  # the step's one wait for a GPU
            if figures.failed:
                raise_together(failure)
            stopped = figures.stopped
            verdict = LEFT_OUT if is_left_out else checks.judge(step, figures)
            if verdict.action == "update":
                updated = job.update(step, figures.grad_norm)  # AdamW; not where fp16 gradients overflowed
                last_loss = figures.loss
            else:
                updated = job.skip_update()
            preferences = job.take_preferences()
            seconds = time.perf_counter() - started
            steps = step + 1

            validation = validate(job, corpora) if _due(steps, run.validation.interval) else {}
            judged = validation.get("ema_validation_loss", validation.get("validation_loss"))
            is_best = judged is not None and note_validation(job.best, run.validation, steps, judged)
            if record is not None:
                record.step(step, figures, seconds, {**preferences, **validation}, skipped=not updated)
            verdict.raise_stop()
            if verdict.action == "roll_back":
                steps = checks.roll_back()
                continue_stream(corpora, checkpointer.newest, steps)
                with failing_together():
                    if record is not None:
                        record.go_back(steps)
                continue
            for callback in after_step:
                callback.after_step(steps)

            is_over = is_last_step(job.best, run, steps)
            ends = stopped or (is_over and run.checkpoint.save_last)
            if _due(steps, run.checkpoint.interval) or ends or (is_best and run.validation.keep_best):
                checkpointer.save(steps, required=ends, prune=verdict.action == "update")
            checkpointer.poll()
        checkpointer.wait()

        sample = None
        if run.sample.prompt is not None and corpora.tokenizer is not None and not stopped:
            sample = sample_text(job, run.sample.prompt, corpora.tokenizer)
        saved = find_checkpoint("auto", run_dir / CHECKPOINTS)
        outcome = Outcome(
            run_dir=str(run_dir),
            steps=steps,
            loss=last_loss,
            checkpoint=str(saved) if saved is not None else None,
            sample=sample,
            stopped=stopped,
            is_first_process=is_first_process,
        )
        with failing_together():
            if record is not None:
                record.end(outcome)
                note_end(run_dir)
        return outcome


def _checkpoint_of(run: RunConfig, run_dir: Path, stack: ExitStack) -> Path | None:
    """Keep other jobs out of an existing run folder until ``stack`` ends, and find where the run resumes."""
    if run_dir.is_dir():
        stack.enter_context(open_run_folder(run_dir))
        with writing(run_dir / CHECKPOINTS):
            tidy(run_dir / CHECKPOINTS)
    return find_checkpoint(run.checkpoint.resume, run_dir / CHECKPOINTS)


def _fill(job: Job, corpora: Corpora, checkpoint: Path | None) -> tuple[Path | None, int]:
    """Fill the weights from the checkpoint, a pretrained model, or the seed.

    Returns the checkpoint, or the one before it where that was damaged, and the steps taken.
    """
    run = job.run
    if run.model.from_hf is not None:
        check_same_tokenizer(run.model.from_hf, corpora.tokenizer)
    if checkpoint is None or run.lora.rank:  # a checkpoint of LoRA has only the adapters
        if run.model.from_hf is not None:
            load_pretrained(job, run.model.from_hf)
        else:
            job.initialize(run.training.seed)
    if checkpoint is None:
        return None, 0
    return load_newest(checkpoint, job, run.checkpoint.resume == "auto")


def validate(job: Job, corpora: Corpora) -> dict[str, float]:
    """Mean loss over the same ``validation.steps`` batches every time, of the weights and of their moving average."""
    assert corpora.validation is not None, "open_corpora has made one"
    batches = [batch for step in range(job.run.validation.steps) for batch in corpora.validation.step(step)]
    mine = micro_batches(batches, job.run, job.grid.cp, job.device)
    found = {"validation_loss": job.evaluate(mine).item()}
    found = {**{f"validation_{name}": value for name, value in job.take_preferences().items()}, **found}
    if job.average is not None and job.average.has_begun:
        with job.averaged():
            found["ema_validation_loss"] = job.evaluate(mine).item()
            job.take_preferences()  # those of the averages are not shown
    return decided_by_rank_0(lambda: found)  # whose bits all processes judge by


def _due(steps: int, interval: int) -> bool:
    return interval > 0 and steps % interval == 0


def _on_any_rank(flag: bool, device: torch.device) -> bool:
    """True where the flag is set on any rank: signals arrive at different times, and all must stop at the same step."""
    found = torch.tensor(flag, dtype=torch.float32, device=device)
    with purpose("stop signal"):
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found)
