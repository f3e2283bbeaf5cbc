"""Parity's output names the keys of a run file that it replaces or ignores."""

from __future__ import annotations

from typing import Any

import pytest
from mutation import mutated
from pool import Pool
from tiny_runs import LLAMA, tiny_run
from tuned_products import parity_on_cpu

from fourfold.config.run import RunConfig
from fourfold.reports.terminal import parity_table
from fourfold.verification.not_compared import not_compared
from fourfold.verification.parity import as_verified
from fourfold.verification.parity_report import ParityReport

LOW = {"precision": "bf16", "master_weights": "bf16", "reduce_dtype": "bf16"}
PREFERENCES = {"data": {"format": "preferences", "train": [{"path": "x"}]}}


def named(**sections: Any) -> dict[str, str]:
    run = tiny_run(LLAMA, **sections)
    return not_compared(run, as_verified(run, 3))


@pytest.mark.parametrize(
    ("sections", "key", "reason"),
    [
        ({"training": LOW | {"float8": "tensorwise"}}, "training.precision", "'fp32' in place of 'bf16'"),
        ({"training": LOW | {"float8": "tensorwise"}}, "training.master_weights", "'fp32' in place of 'bf16'"),
        ({"training": LOW | {"float8": "tensorwise"}}, "training.reduce_dtype", "'fp32' in place of 'bf16'"),
        (
            {"training": LOW | {"float8": "tensorwise"}, "optimizer": {"stochastic_rounding": True}},
            "optimizer.stochastic_rounding",
            "false in place of true",
        ),
        (
            {"training": {"precision": "fp16"}, "lora": {"rank": 4}, "optimizer": {"name": "muon"}},
            "training.precision",
            "'fp32' in place of 'fp16'",
        ),
        ({"training": {"compile": True}}, "training.compile", "false in place of true"),
        ({"optimizer": {"lr": 0.5}}, "optimizer.lr", "0.001 in place of 0.5"),
        ({"validation": {"interval": 5}}, "validation", "does not stop or keep the best checkpoint"),
        ({}, "data", "never reads the data itself"),
        ({"masks": {"functions": ["a:b"]}}, "masks.functions", "['a:b'] has no effect in parity"),
        ({"checks": {"spike": "skip"}}, "checks", "does not look for bad steps"),
        ({"checkpoint": {"interval": 7}}, "checkpoint.interval", "7 has no effect in parity"),
        ({"sample": {"prompt": "x"}}, "sample.prompt", "'x' has no effect in parity"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_part_that_parity_does_not_compare_is_named(sections: dict[str, Any], key: str, reason: str) -> None:
    assert reason in named(**sections)[key]


def test_a_vocabulary_without_the_tokens_of_conversations_is_named() -> None:
    run = tiny_run(LLAMA | {"vocab_size": 97}, **PREFERENCES, dpo={"beta": 0.1})
    assert "vocabulary is too small" in not_compared(run, as_verified(run, 3))["data.format"]


def test_what_parity_compares_is_not_named() -> None:
    compared = {
        "parallel": {"x": 2, "dp": 2, "zero": 1},
        "overlap": {"batch_parts": 2},
        "activation_checkpoint": {"mode": "full"},
        "lr_scheduler": {"warmup_steps": 2},
        "optimizer": {"name": "muon", "lr": 1e-3, "eps": 1e-3, "max_grad_norm": 0.1},
        "training": {"train_steps": 5},
        "metrics": {"log_interval": 3},
        "ema": {"decay": 0.9},
        **PREFERENCES,
        "dpo": {"beta": 0.1},
    }
    assert list(named(**compared)) == ["data"]


def fault_body(rank: int, world_size: int, run: RunConfig, fault: tuple[str, str, str] | None) -> ParityReport | None:

    if fault is None:
        return parity_on_cpu(run, steps=2)
    with mutated(*fault):
        return parity_on_cpu(run, steps=2)


@pytest.mark.parametrize(
    ("fault", "quantity", "sections"),
    [
        pytest.param(None, "", {"training": {"precision": "fp16"}, "ema": {"decay": 0.9}}, id="no fault"),
        pytest.param(
            (
                "fourfold.training.job:Job.update",
                "return self.skip_update()",
                "self.optimizer.step(0.0)\nreturn self.skip_update()",
            ),
            "weights",
            {"training": {"precision": "fp16"}, "optimizer": {"name": "muon"}},
            id="a step that overflows changes Muon's momentum",
        ),
        pytest.param(
            (
                "fourfold.training.job:Job.clip",
                "self.clip_gradients(self.run.optimizer.max_grad_norm, scale)",
                "self.clip_gradients(self.run.optimizer.max_grad_norm, 1.0) / scale",
            ),
            "weights",
            {"training": {"precision": "fp16"}},
            id="gradients are clipped before the loss scale is removed",
        ),
        pytest.param(
            (
                "fourfold.training.job:Job.evaluate",
                "self.mean_loss(self.outputs(micro_batches), kept)",
                "torch.stack([total / 64 for total in self.outputs(micro_batches)]).mean()",
            ),
            "validation",
            {},
            id="the validation loss counts only one rank",
        ),
        pytest.param(
            (
                "fourfold.training.job:Job.skip_update",
                "self.optimizer.drop_gradients()",
                "self.optimizer.drop_gradients(); self.average.update() if self.average else None",
            ),
            "averages",
            {"ema": {"decay": 0.9}},
            id="the average takes in a step that is dropped",
        ),
    ],
)
def test_parity_catches_faults_of_dropped_steps_loss_scales_and_validation(
    fault: tuple[str, str, str] | None, quantity: str, sections: dict[str, Any], pool: Pool, tmp_path: Any
) -> None:
    run = tiny_run(LLAMA, {"dp": 2}, output_dir=str(tmp_path), **sections)
    report = pool.run(2, fault_body, run, fault)[0]
    failed = [name for name in report.deviations if report.worst(name).ratio > report.limit]
    assert (quantity in failed) == bool(fault), report.record()
    assert report.ok == (fault is None)


def test_the_report_says_what_was_not_compared(capsys: pytest.CaptureFixture[str], pool: Pool, tmp_path: Any) -> None:
    run = tiny_run(LLAMA, {}, output_dir=str(tmp_path), training={"precision": "bf16"})
    report = pool.run(1, fault_body, run, None)[0]
    reason = "parity runs with 0.1 in place of 1.0"
    assert report.record()["not_compared"]["optimizer.max_grad_norm"] == reason
    assert "training.precision" not in report.record()["not_compared"]
    parity_table(report)
    out = capsys.readouterr().out
    assert f"not compared: optimizer.max_grad_norm ({reason})" in out
    tensors = [line.split()[4] for line in out.splitlines() if "own types" in line]
    assert tensors[:2] == ["gradients", "weights"]
