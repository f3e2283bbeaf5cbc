"""No run goes on, nor ends well, after a loss that is not a number."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fourfold.errors import UserError
from fourfold.training.job import StepResult
from fourfold.training.step_checks import check_step


def result(loss: float = 2.0, norm: float = 1.0, kept: int = 8, skipped: bool = False) -> StepResult:
    return StepResult(torch.tensor(loss), torch.tensor(norm), torch.tensor(kept), skipped)


def test_finite_steps_pass() -> None:
    check_step(result(), 0, Path("checkpoints"))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("skipped", [False, True])
def test_a_loss_that_is_not_finite_ends_the_run(value: float, skipped: bool) -> None:
    """Also of a step that fp16 has skipped: no loss scale helps, for the loss is not scaled."""
    with pytest.raises(UserError, match=rf"the loss is {value} at step 6; .*in checkpoints"):
        check_step(result(loss=value, skipped=skipped), 5, Path("checkpoints"))


def test_gradients_that_overflow_in_fp16_are_skipped() -> None:
    check_step(result(norm=math.inf, skipped=True), 0, Path("checkpoints"))
    with pytest.raises(UserError, match="the gradient norm is inf at step 1"):
        check_step(result(norm=math.inf), 0, Path("checkpoints"))


def test_a_step_without_a_label_ends_the_run() -> None:
    with pytest.raises(UserError, match="step 1 has no token to learn"):
        check_step(result(kept=0), 0, Path("checkpoints"))
