"""Warn if a resumed run differs from the run that wrote its checkpoint."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fourfold.checkpoints.saved_state import SavedSchedule, compared_settings, read_state
from fourfold.config.run import RunConfig
from fourfold.training.corpora import Corpora
from fourfold.training.optimizer import learning_rate

JUMP = 0.01
"""A jump of the learning rate causes a warning if the rates of the old and the new schedule differ by more than this
fraction of the larger rate."""

_EFFECTS = {
    "training data": "the run may train again on text from before the checkpoint",
    "answer mask of the training data": "earlier steps were trained on other tokens of the same conversations",
}


def warn_of_changes(corpora: Corpora, checkpoint: Path, run: RunConfig) -> None:
    """Warn if the data, the loss masks, or other settings of the run file have changed since the checkpoint."""
    saved = read_state(checkpoint)
    was, now = saved.first_samples or {}, corpora.first_samples
    changed = {data for data, digest in was.items() if now.get(data, digest) != digest}
    if saved.stream is not None and corpora.stream is None:
        changed.add("training data")
    for data in sorted(changed):
        _warn(
            f"the {data} has changed since the checkpoint {checkpoint} (a corpus, or the weight of a corpus): "
            f"{_EFFECTS.get(data, 'the validation losses so far are not comparable with later validation losses')}"
        )
    masks, saved_masks = run.masks.model_dump(mode="json"), saved.masks or {}
    if any(saved_masks.get(key, value) != value for key, value in masks.items()):
        _warn(
            f"[masks] has changed since the checkpoint {checkpoint}, so earlier steps were trained on other tokens; "
            "give the run another name to train all steps with the same masks"
        )
    if saved.optimization is not None:
        for warning in settings_warnings(saved.optimization, compared_settings(run), saved.step, checkpoint):
            _warn(warning)


def settings_warnings(was: Mapping[str, Any], now: Mapping[str, Any], step: int, checkpoint: Path) -> Iterator[str]:
    """Yield warnings about changed keys and about a jump of the learning rate. Keys without an effect on training or on
    measurements are left out.

    Args:
        was: Value of each run-file key before the checkpoint. If another version of fourfold wrote the checkpoint, only
            keys that both versions know are compared.
        now: Value of each key after the checkpoint.
        step: Number of steps that were taken before the checkpoint.
        checkpoint: Path of the checkpoint, for the message.
    """
    old, new = SavedSchedule(**was), SavedSchedule(**now)
    changed = [
        f"{key} = {json.dumps(was[key])} → {json.dumps(value)}"
        for key, value in now.items()
        if was.get(key, value) != value and (has_effect(key, old) or has_effect(key, new))
    ]
    if changed and step < new.train_steps:
        yield (
            f"these keys differ from the checkpoint {checkpoint}: {', '.join(changed)}. The next steps and "
            "their measurements use the new values; to continue as before, set these keys back"
        )
        last, planned, rate = rate_at(old, max(step - 1, 0)), rate_at(old, step), rate_at(new, step)
        if abs(rate - planned) > JUMP * max(rate, planned):
            yield (
                f"the learning rate jumps from {last:.3g} in step {step} to {rate:.3g} in step {step + 1}; the "
                f"checkpoint's schedule has {planned:.3g} in that step"
            )


def rate_at(schedule: SavedSchedule, step: int) -> float:
    """Return the learning rate of step ``step``. The first step is 0."""
    return learning_rate(step, schedule.train_steps, schedule.lr, schedule)


def has_effect(key: str, schedule: SavedSchedule) -> bool:
    """Return whether a key of the run file has any effect in a run with this schedule and optimizer."""
    match key:
        case "training.train_steps" | "lr_scheduler.min_lr_ratio":
            return schedule.decay_style != "constant"
        case "lr_scheduler.decay_ratio":
            return schedule.decay_style == "wsd"
        case "optimizer.momentum":
            return schedule.optimizer == "muon"
    return True


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr)
