"""Say in sentences how a run of another training program compares with the best layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fourfold.planning.plan_record import PlanRecord


def other_program_sentences(result: PlanRecord) -> list[str]:
    """Return sentences about a run of another program. They list the settings of its file, and compare the predicted
    step with the measured step and with the best layouts. Return an empty list without such a run."""
    other, own = result.request.other, result.own
    if other is None or own is None:
        return []
    measured, predicted, (low, high) = other.row.step_seconds, other.predicted, other.interval or (1.0, 1.0)
    lists = ((title.replace("_", " ").capitalize(), texts) for title, texts in other.lists.items())
    sentences = [f"{title}: {', '.join(texts)}." for title, texts in lists if texts]
    if measured is not None:
        sentences.append(
            f"Measured: {measured:.4g} s per step. Predicted: {predicted:.4g} s ({predicted / measured - 1:+.0%}), and "
            f"with 90 % probability {predicted * low:.3g} to {predicted * high:.3g} s. The table's predictions use "
            "constants that are fitted to the measured step."
        )
    if own.p_oom > 0.5:
        sentences.append(f"Your layout is not predicted to fit: P(OOM) is {own.p_oom:.0%}.")
    factor = result.within_error.factor
    for name, best in ((other.row.program, result.theirs), ("fourfold", result.plan.best)):
        gain = own.seconds / best.seconds if best is not None else 0.0
        doubt = f" Below {factor:.2f}, either may be the faster one." if 1 / factor < gain < factor else ""
        faster = f"The best layout in {name} is {gain:.2f} times as fast as yours.{doubt}"
        sentences.append(faster if best is not None else f"No layout of {name} fits.")
    return sentences
