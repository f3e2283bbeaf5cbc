"""Steps with each feature that a run file can turn on: recomputation, offload, compilation, dtypes, optimizers,
adapters, and replayed steps. Each is compared with the plain step on the same device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from one_device import PACKED, Steps, distance, job_on, long_sequences, losses_apart, run_on, steps_on, wide
from tiny_runs import DEEPSEEK, GEMMA2, MIXTURE

from benchmarks.host_waits import host_waits
from fourfold.training.replay import Replay
from fourfold.verification.batches import random_micro_batches

Record = Callable[[str, object], None]

SELECTIVE = {"mode": "selective", "modules": ["attention", "mlp", "norms", "gathers"]}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "selective": SELECTIVE,
    "full": {"mode": "full"},
    "offloaded": {"mode": "full", "offload": True},
    "every second offloaded": {"mode": "full", "every": 2, "offload": True},
}


def plain_and_changed(
    device: torch.device, precision: str, training: dict[str, Any], tokens: int = 500, **sections: Any
) -> tuple[Steps, Steps]:
    """Take three steps of the wide model in float32 or bf16, and three steps with the changes of ``training`` and
    ``sections``."""
    sizes, exact = long_sequences(device, tokens), "fp32" if precision == "fp32" else "bf16"
    plain = steps_on(device, run_on(device, wide(device), exact, training=sizes), 3)
    changed = run_on(device, wide(device), precision, training=sizes | training, **sections)
    return plain, steps_on(device, changed, 3)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("mode", RECOMPUTED)
def test_recomputation_and_offload_change_nothing(mode: str, device: torch.device, record_property: Record) -> None:
    plain, changed = plain_and_changed(device, "fp32", {}, 1000, activation_checkpoint=RECOMPUTED[mode])
    far, losses = distance(changed, plain), losses_apart(changed, plain)
    record_property("difference", {"losses": losses, "worst": far.worst, "of": far.name})
    assert far.worst < 1e-4, far
    assert losses < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "offloaded"])
def test_compilation_changes_only_the_rounding(
    mode: str, device: torch.device, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Skip the CPU, because compiling takes a minute there, and another test does it.
    if device.type == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    recomputed = RECOMPUTED.get(mode, {"mode": "none"})
    plain, changed = plain_and_changed(device, "bf16", {"compile": True}, 1000, activation_checkpoint=recomputed)
    far, losses = distance(changed, plain), losses_apart(changed, plain)
    record_property("difference", {"losses": losses, "rms": far.rms, "worst": far.worst})
    assert far.rms < 0.05, far
    assert losses < 2e-3


OTHERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fp16": ("fp16", {}, {"loss_scaling": {"initial": 1024.0}}),
    "muon": ("bf16", {}, {"optimizer": {"name": "muon"}}),
    "lion": ("bf16", {}, {"optimizer": {"name": "lion", "lr": 1e-4}}),
    "stochastic rounding": ("bf16", {"master_weights": "bf16"}, {"optimizer": {"stochastic_rounding": True}}),
    "lora": ("bf16", {}, {"lora": {"rank": 8}}),
    "float8 tensorwise": ("bf16", {"float8": "tensorwise"}, {}),
    "float8 rowwise": ("bf16", {"float8": "rowwise"}, {}),
    "float8 rowwise_with_gw_hp": ("bf16", {"float8": "rowwise_with_gw_hp"}, {}),
    "float8 tensorwise, compiled": ("bf16", {"float8": "tensorwise", "compile": True}, {}),
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", OTHERS)
def test_number_types_optimizers_and_adapters_train(
    name: str, device: torch.device, record_property: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first loss equals the first loss in bf16. Later losses are close to the losses in bf16, because three steps
    change the weights only slightly."""
    precision, training, sections = OTHERS[name]
    if "float8" in training:
        pytest.importorskip("torchao", reason="float8 needs torchao")
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
            pytest.skip("float8 needs a GPU of compute capability 8.9 or more")
    if device.type == "cpu" and training.get("compile"):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    plain, changed = plain_and_changed(device, precision, training, 512, **sections)
    record_property("losses", {"bf16": plain.losses, name: changed.losses})
    assert changed.losses[0] == pytest.approx(plain.losses[0], rel=0.01)
    assert changed.losses == pytest.approx(plain.losses, rel=0.05)
    assert all(norm > 0 for norm in changed.norms)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("model", "precision", "more"),
    [
        (None, "fp32", {}),
        (None, "bf16", {}),
        (None, "bf16", PACKED),
        (GEMMA2, "bf16", PACKED),
        (MIXTURE, "bf16", {}),
        (None, "bf16", {"training": {"compile": True}}),
    ],
    ids=["fp32", "bf16", "packed", "gemma2 packed", "mixture", "compiled"],
)
def test_a_replayed_step_raises_no_false_alarm(
    model: dict[str, Any] | None,
    precision: str,
    more: dict[str, Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two passes on a healthy device give the same bits, although kernels may add in any order by default."""
    training = more.get("training", {})
    if device.type == "cpu" and training:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    sizes = long_sequences(device, 2048, micro_batch_size=2, **training)
    sections = {key: value for key, value in more.items() if key != "training"}
    run = run_on(device, model or wide(device), precision, training=sizes, checks={"replay_interval": 1}, **sections)
    with job_on(device, run) as job:
        replay = Replay(job)
        for step in range(3):
            batches = random_micro_batches(run, step, job.grid, device)
            replay.forward_backward(step, batches, job.count_kept(batches))
            job.update(step, job.clip())


WAITING: dict[str, tuple[dict[str, Any] | None, str, dict[str, Any]]] = {
    "dense": (None, "bf16", {}),
    "packed": (None, "bf16", PACKED),
    "sliding packed": ({"sliding_window": 16}, "bf16", PACKED),
    "gemma2 packed": (GEMMA2, "bf16", PACKED),
    "mixture": (MIXTURE, "bf16", {}),
    "deepseek": (DEEPSEEK, "bf16", {}),
    "fp16": (None, "fp16", {}),
    "full recomputation": (None, "bf16", {"activation_checkpoint": {"mode": "full"}}),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", WAITING)
def test_a_step_makes_the_host_wait_at_most_once(name: str, device: torch.device, record_property: Record) -> None:
    """With fp16, the host waits for the gradient norm. The training loop waits once more, for the figures of the
    step."""
    changes, precision, sections = WAITING[name]
    model = wide(device) | (changes or {}) if changes is None or "preset" not in changes else changes
    run = run_on(device, model, precision, training=long_sequences(device, 512), **sections)
    with job_on(device, run) as job:
        for step in range(2):
            job.train_step(random_micro_batches(run, step, job.grid, device), step)
        batches = random_micro_batches(run, 2, job.grid, device)
        waits = host_waits(device, lambda: job.train_step(batches, 2))
    record_property("waits", dict(waits.most_common(10)))
    assert waits.total() <= (precision == "fp16"), waits.most_common(10)


def test_a_line_that_waits_is_named(device: torch.device) -> None:
    values = torch.ones(2, device=device)
    waits = host_waits(device, lambda: [values.sum().item() for _ in range(3)])
    assert list(waits.values()) == [3]
    assert next(iter(waits)).startswith("tests/gpu/test_steps_on_devices.py:")
