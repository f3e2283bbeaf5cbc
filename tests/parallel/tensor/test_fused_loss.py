"""Test the Triton kernels of the loss under Triton's interpreter. Compare them with torch in float64, and use them in
full runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compiled_kernels import output_of
from pool import Pool
from tiny_runs import GEMMA2, LLAMA, tiny_run
from torch import Tensor
from tuned_products import parity_on_cpu

from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig
from fourfold.models.softcap import softcapped
from fourfold.parallel.tensor import fused_loss, head
from fourfold.parallel.tensor.fused_loss import differentiate_logits, fuses_loss, normalize_logits, triton_works
from fourfold.verification.parity_report import ParityReport

pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""Largest allowed error of the gradient in each dtype. No gradient is larger than 1, so in 16 bits the limit is a
little more than half the distance between numbers near 1."""


def losses_of(
    logits_mv: Tensor, labels_m: Tensor, factors_m: Tensor, vocabulary: int, cap: float, ranks: int
) -> tuple[Tensor, Tensor]:
    """Return the losses and the gradient of the logits, computed with the kernels' two passes as ``ranks`` ranks of x
    would compute them."""
    parts, wide = logits_mv.clone().chunk(ranks, 1), logits_mv.shape[1] // ranks
    places = [(rank * wide, min(max(vocabulary - rank * wide, 0), wide)) for rank in range(ranks)]
    both = [normalize_logits(part, labels_m, *place, cap) for part, place in zip(parts, places, strict=True)]
    normalizer_m, target_m = torch.stack(both)[:, 0].logsumexp(0), torch.stack(both)[:, 1].sum(0)
    kept_m = labels_m != IGNORE_INDEX
    for part, place in zip(parts, places, strict=True):
        differentiate_logits(part, labels_m, normalizer_m, factors_m * kept_m, *place, cap)
    return (normalizer_m - target_m) * kept_m, torch.cat(parts, 1)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("padded", "vocabulary", "ranks", "cap"),
    [(301, 301, 1, 0.0), (9000, 8999, 1, 0.0), (384, 257, 3, 0.0), (384, 100, 2, 1.5), (64, 64, 2, 30.0)],
)
def test_fused_loss_is_cross_entropy(dtype: torch.dtype, padded: int, vocabulary: int, ranks: int, cap: float) -> None:
    """Cases have odd vocabularies, more than one block of logits, padding, ranks with nothing but padding, caps, and
    ignored labels."""
    generator = torch.Generator().manual_seed(padded)
    logits_mv = (4 * torch.randn(7, padded, generator=generator)).to(dtype)
    labels_m = torch.tensor([0, vocabulary - 1, IGNORE_INDEX, vocabulary // 2, vocabulary // 3, IGNORE_INDEX, 1])
    factors_m = torch.rand(7, generator=generator)
    losses_m, gradient_mv = losses_of(logits_mv, labels_m, factors_m, vocabulary, cap, ranks)

    exact_mv = logits_mv.double().requires_grad_()
    real_mv = softcapped(exact_mv, cap)[:, :vocabulary]
    exact_m = torch.nn.functional.cross_entropy(real_mv, labels_m, ignore_index=IGNORE_INDEX, reduction="none")
    (exact_m * factors_m).sum().backward()
    torch.testing.assert_close(losses_m, exact_m.detach().float(), rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(gradient_mv.double(), exact_mv.grad, rtol=0, atol=TOLERANCE[dtype])
    assert gradient_mv.dtype == dtype
    assert not gradient_mv[:, vocabulary:].any() and not gradient_mv[2].any()


def test_bad_logits_are_not_hidden() -> None:
    """The step's checks look for losses that are not finite, so the kernels must pass them on."""
    logits_mv = torch.randn(3, 50)
    logits_mv[0, 3], logits_mv[1, 4] = torch.nan, torch.inf
    losses_m, gradient_mv = losses_of(logits_mv, torch.tensor([1, 2, 3]), torch.ones(3), 50, 0.0, 1)
    assert losses_m.isfinite().tolist() == [False, False, True]
    assert gradient_mv.isfinite().all(1).tolist() == [False, False, True]


def parity_body(rank: int, world_size: int, run: RunConfig) -> ParityReport | None:
    with (
        patch.object(head, "fuses_loss", lambda device_type: True),
        patch.object(head, "normalize_logits", wraps=normalize_logits) as fused,
    ):
        report = parity_on_cpu(run, steps=1)
    assert fused.called
    return report


@pytest.mark.parametrize(
    ("model", "grid", "sections"),
    [
        (GEMMA2, {"x": 2}, {"masks": {"goldfish": {"strategy": "hash", "h": 4}}}),
        pytest.param(LLAMA, {"x": 2, "y": 2}, {}, marks=pytest.mark.slow),
    ],
    ids=["capped logits and goldfish", "x and y"],
)
def test_parity_holds_with_the_fused_loss(
    pool: Pool, model: dict[str, Any], grid: dict[str, int], sections: dict[str, Any], tmp_path: Path
) -> None:
    small = {"global_batch_size": 2, "micro_batch_size": 2, "seq_length": 16}  # Triton's interpreter is slow
    run = tiny_run(model, grid, training=small, output_dir=str(tmp_path), **sections)
    report = pool.run(run.parallel.world_size, parity_body, run)[0]
    assert report.ok, report.record()


def test_the_loss_is_fused_if_triton_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fuses_loss("cuda") == triton_works() and not fuses_loss("cpu")
    monkeypatch.delenv("CC", raising=False)
    triton_works.cache_clear()
    with patch.object(shutil, "which", lambda name: None):
        assert not fuses_loss("cuda"), "no C compiler"
    triton_works.cache_clear()
    with patch.object(fused_loss.importlib.util, "find_spec", lambda name: None):
        assert not fuses_loss("cuda"), "no Triton"
    triton_works.cache_clear()


@pytest.mark.slow
def test_loss_kernels_compile_for_a_gpu() -> None:
    """No GPU is needed to compile down to the machine code of an H100 and an MI300. The kernels fit in registers."""
    printed = output_of(Path(__file__).with_name("compile_loss_kernels.py"))
    # There are two kernels, two kinds of targets, three dtypes, and two settings of the cap.
    assert len(printed.splitlines()) == 2 * 2 * 3 * 2
