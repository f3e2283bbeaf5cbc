"""List the parts of a run file that parity replaces or leaves out. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fourfold.config.run import RunConfig

COMPARED = (
    *("model", "parallel", "overlap", "activation_checkpoint", "training", "optimizer", "lr_scheduler", "lora", "moe"),
    *("ema.decay", "dpo.beta", "masks.goldfish", "data.mask_documents", "loss_scaling.initial"),
)
"""Sections and keys whose effect parity compares unless it replaces their values."""

WITHOUT_NUMBERS = ("name", "output_dir", "metrics", "fault_tolerance", "data.source", "data.train", "data.cache_dir")
"""Sections and keys that change no number. The paths of the data are included, because the report has a separate
sentence about them."""

ALWAYS = {
    "data": "parity draws random samples, so it reads no data and does not check the order of samples after resuming",
}
REASONS = {
    "data.format": "the samples and their labels are random, so the masks of answers are not compared",
    "dpo.beta": "the reference's log-probabilities are random, so the reference model is not compared",
    "ema.decay": "the averages are compared, but validation and samples with them are not",
    "validation": "parity compares the validation loss of one step, not when a run validates or stops",
    "checks": "parity drops one step, but detects no bad one",
}


def not_compared(run: RunConfig, verified: RunConfig) -> dict[str, str]:
    """Name what parity does not compare.

    Args:
        run: The run as in the run file.
        verified: The run as parity runs it.

    Returns:
        A reason for each key whose value parity replaces, and for each key or section that has no effect in parity and
        is not at its default.
    """
    found, replaced = dict(ALWAYS), dict(_leaves(verified.model_dump()))
    own = dict(_leaves(run.model_dump()))
    for key, value in _leaves(run.model_dump(exclude_defaults=True)):
        section = key.partition(".")[0]
        name = section if section in REASONS else key
        if name in REASONS:
            found[name] = REASONS[name]
        elif not _is_in(key, (*COMPARED, *WITHOUT_NUMBERS)):
            found[key] = f"{_shown(value)} has no effect in parity"
    for key, value in own.items():
        if replaced[key] != value:
            found[key] = f"parity runs with {_shown(replaced[key])} in place of {_shown(value)}"
    return found


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _is_in(key: str, places: tuple[str, ...]) -> bool:
    return any(key == place or key.startswith(place + ".") for place in places)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
