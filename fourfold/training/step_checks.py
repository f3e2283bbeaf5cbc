"""Find steps with a bad loss or gradient norm before the weights are updated, and decide what to do about them. The run
file's section [checks] sets the rules."""

import math
import sys
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from fourfold.checkpoints.checkpoint import Checkpointer, load_newest
from fourfold.checkpoints.find_checkpoints import step_of
from fourfold.parallel.grid.communicate import purpose
from fourfold.parallel.grid.shared_failure import decided_by_rank_0, failing_together
from fourfold.training.bad_steps import BadSteps, samples_of
from fourfold.training.job import Job, StepResult
from fourfold.training.metrics import peak_memory_bytes

REMEDY = "lower optimizer.lr or lengthen lr_scheduler.warmup_steps"


class SharedFigures(NamedTuple):
    """The results of one step, combined over all processes. Every process has the same values."""

    loss: float
    grad_norm: float
    kept: int
    """Number of tokens in the loss. With [dpo], the number of pairs."""

    stopped: bool
    """Whether at least one process has been asked to stop."""

    failed: bool
    """Whether rank 0 failed to write the record of the previous step."""

    peak_memory_bytes: int
    """The highest peak memory of any rank so far, in bytes."""


class Verdict(NamedTuple):
    """The verdict on a step: the action that the run takes, and the reason. The reason is empty if the step is good."""

    action: Literal["update", "skip", "roll_back", "stop"]
    reason: str = ""


GOOD = Verdict("update")
LEFT_OUT = Verdict("skip", "its batch is left out")


class StepChecks:
    """Judges every step of a run. Every process calls the methods, and every process gets the same verdict.

    A step is *bad* if its loss or gradient norm is NaN or infinite, or a spike (far above the values of recent steps).
    With ``checks.spike = 'off'``, spikes are not bad. An overflow of fp16 gradients does not make a step bad, because
    loss scaling handles the overflow.

    A bad step is written to bad_steps.jsonl in the run's folder before the run acts on the step. A resumed run reads
    from this file which batches to leave out. With ``checkpoint.resume = 'never'``, an existing file is renamed and not
    used.
    """

    def __init__(self, run_dir: Path, job: Job, checkpointer: Checkpointer) -> None:
        self.job, self.run, self.config = job, job.run, job.run.checks
        self.bad_steps, self.checkpointer = BadSteps(run_dir), checkpointer
        self._left_out = decided_by_rank_0(self._read)

    def _read(self) -> list[dict[str, Any]]:
        if self.run.checkpoint.resume == "never":
            self.bad_steps.set_aside()
        return [line for line in self.bad_steps.read() if "skips" in line]

    def leaves_out(self, step: int) -> bool:
        """Return whether bad_steps.jsonl says to leave out the batch of a step (the first step is 0).

        Batches are added to this file when the run rolls back, and when a step has failed in several attempts.
        """
        return any(step + 1 in line["skips"] for line in self._left_out)

    def judge(self, step: int, figures: SharedFigures) -> Verdict:
        """Return the verdict on a step (the first step is 0), from its loss and gradient norm over all ranks. Call this
        before the update changes the weights."""
        verdict = self._verdict(step, figures.loss, figures.grad_norm, figures.kept)
        if verdict.action == "stop":
            # Wait for a save that may still be in progress.
            self.checkpointer.wait(required=False)
        if verdict != GOOD:
            self._record(step, figures, verdict)
        return verdict

    def roll_back(self) -> int:
        """Load the newest checkpoint, and return its number of steps. If the newest checkpoint is damaged, and
        ``checkpoint.resume`` is "auto", load an earlier checkpoint instead."""
        assert self.checkpointer.newest is not None, "judge has found one"
        path, step = load_newest(self.checkpointer.newest, self.job, self.run.checkpoint.resume == "auto")
        self.checkpointer.newest = path
        return step

    def _verdict(self, step: int, loss: float, grad_norm: float, kept: int) -> Verdict:
        recent = self.job.recent
        if kept == 0:
            return Verdict(
                "stop",
                f"step {step + 1} has no token to learn: every document of its sequences is one token long, or its "
                "masks keep no token",
            )
        if self.job.loss_scale is not None and math.isfinite(loss) and not math.isfinite(grad_norm):
            recent.overflows_in_a_row += 1
            return self._overflow(step)  # The loss scale was too large, and ``Job.update`` halves it.
        recent.overflows_in_a_row = 0
        complaint = _not_finite(loss, grad_norm)
        policy: str = self.config.non_finite
        if complaint is None and self.config.spike != "off":
            complaint, policy = self._spike(loss, grad_norm), self.config.spike
        if complaint is not None:
            return self._answer(policy, step, f"{complaint} at step {step + 1}")
        recent.skipped_in_a_row = 0
        if self.config.spike != "off":
            for values, value in ((recent.losses, loss), (recent.grad_norms, grad_norm)):
                values.append(value)
                del values[: -self.config.spike_window]
        return GOOD

    def _overflow(self, step: int) -> Verdict:
        count = self.job.recent.overflows_in_a_row
        if count < self.run.loss_scaling.max_overflows:
            return GOOD
        return Verdict(
            "stop",
            f"gradients overflowed fp16 in {count} steps in a row, up to step {step + 1}; {REMEDY}, "
            "or train with training.precision = 'bf16'",
        )

    def _spike(self, loss: float, grad_norm: float) -> str | None:
        """Return a phrase that describes the spike if the loss or the gradient norm is one. Otherwise return None."""
        recent, window, sigmas = self.job.recent, self.config.spike_window, self.config.spike_sigma
        for name, value, before in (("loss", loss, recent.losses), ("gradient norm", grad_norm, recent.grad_norms)):
            if len(before) >= window:
                # ``fmean`` and ``pstdev`` sum exactly, so all processes get the same result.
                mean, deviation = fmean(before[-window:]), pstdev(before[-window:])
                if value > mean + sigmas * deviation:
                    return (
                        f"the {name} is {value:.6g}, more than {sigmas:g} standard deviations ({deviation:.3g}) over "
                        f"the mean {mean:.6g} of the last {window} good steps,"
                    )
        return None

    def _answer(self, policy: str, step: int, complaint: str) -> Verdict:
        """Return the verdict on a bad step. It is ``policy`` (from the run file), or "stop" if there were too many bad
        steps in a row, or if there is no checkpoint to return to."""
        recent = self.job.recent
        # Allow fewer skips than the run has steps. If the run skipped all of its steps, it would train nothing.
        most = min(self.config.max_in_a_row, self.run.training.train_steps - 1)
        recent.skipped_in_a_row += 1
        if policy == "skip":
            if recent.skipped_in_a_row <= most:
                return Verdict("skip", complaint)
            return self._stop(f"{complaint}, after {most} bad steps in a row were skipped")
        if policy == "roll_back":
            self.checkpointer.wait(required=False)
            target = self.checkpointer.newest
            if target is None:
                return self._stop(f"{complaint}, and there is no checkpoint yet to return to")
            if self._returns_in_a_row(step) < most:
                return Verdict("roll_back", complaint)
            return self._stop(f"{complaint}, after {most} rollbacks since the last good step")
        return self._stop(complaint)

    def _returns_in_a_row(self, step: int) -> int:
        """Return how often the run has rolled back since the last good step before ``step``."""
        good = step - 1
        while self.leaves_out(good):
            good -= 1
        return sum(line["step"] - 1 > good for line in self._left_out if line["step"] <= step)

    def _stop(self, complaint: str) -> Verdict:
        self.checkpointer.wait(required=False)
        newest = self.checkpointer.newest
        where = "start again: there is no checkpoint yet" if newest is None else f"resume from {newest}"
        return Verdict("stop", f"{complaint}; {REMEDY}, and {where}")

    def _record(self, step: int, figures: SharedFigures, verdict: Verdict) -> None:
        """Write a bad step and the indices of its samples to bad_steps.jsonl. Print what the run does about the step,
        unless the run stops."""
        loss, grad_norm = (value if math.isfinite(value) else str(value) for value in figures[:2])
        line = {
            "step": step + 1,
            "action": verdict.action,
            "reason": verdict.reason,
            "loss": loss,
            "grad_norm": grad_norm,
            "samples": samples_of(step + 1, self.run.training.global_batch_size),
        }
        if verdict.action == "roll_back":
            assert self.checkpointer.newest is not None, "judge has found one"
            back_to = step_of(self.checkpointer.newest)
            line |= {
                "back_to": back_to,
                "skips": list(range(max(back_to, step + 1 - self.config.roll_back_batches) + 1, step + 2)),
            }
            self._left_out.append(line)
        with failing_together():
            if dist.get_rank() == 0:
                self.bad_steps.note(line)
                if verdict.action != "stop":
                    print(f"fourfold: {verdict.reason}: {_done(line)}; see {self.bad_steps.path}", file=sys.stderr)


def _done(line: dict[str, Any]) -> str:
    if line["action"] == "skip":
        return "its update is skipped"
    return f"the run returns to step {line['back_to']}, and will skip {len(line['skips'])} of the next batches"


def _not_finite(loss: float, grad_norm: float) -> str | None:
    """Return a phrase that names the value that is not finite, or None if both values are finite."""
    for name, value in (("loss", loss), ("gradient norm", grad_norm)):
        if not math.isfinite(value):
            return f"the {name} is {value}"
    return None


def figures_of_all_ranks(result: StepResult, stopped: bool, failed: bool) -> SharedFigures:
    """Combine the results of a step over all ranks. This waits until the device has computed the results.

    All ranks should have the same loss and the same gradient norm. The function returns the mean over the ranks.
    The mean of equal values is exactly this value. If any rank has NaN, the mean is NaN.

    Args:
        result: This rank's result of the step.
        stopped: Whether this rank has been asked to stop.
        failed: Whether this rank could not write the record of the previous step.
    """
    figures = [figure.double() for figure in (result.loss, result.grad_norm, result.kept_tokens)]
    flags = [figures[0].new_full((), float(flag)) for flag in (stopped, failed)]
    # Sum in float64, because the float64 sum of equal float32 numbers is exact.
    shared = torch.stack(figures + flags)
    peak = shared.new_full((1,), float(peak_memory_bytes(shared.device)))
    with purpose("figures of the step"):
        dist.all_reduce(shared)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
    means_and_peak = torch.cat([shared / dist.get_world_size(), peak]).tolist()
    loss, grad_norm, kept, any_stopped, any_failed, peak_memory = means_and_peak
    return SharedFigures(loss, grad_norm, round(kept), any_stopped > 0, any_failed > 0, round(peak_memory))
