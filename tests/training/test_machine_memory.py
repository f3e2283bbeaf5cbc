"""Before a run on the CPU starts, its weights, gradients, and moments must fit into the machine's memory."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_runs import LLAMA, tiny_run

from fourfold.config.parameter_counts import num_parameters
from fourfold.errors import UserError
from fourfold.training import machine_memory
from fourfold.training.machine_memory import check_machine_memory

BF16 = {"precision": "bf16", "master_weights": "bf16"}


@pytest.mark.parametrize(
    ("sections", "bytes_per_parameter"),
    [
        ({}, 16),
        ({"optimizer": {"name": "lion"}}, 12),
        ({"optimizer": {"name": "muon"}}, 12),
        ({"training": BF16}, 8),
        ({"training": {**BF16, "reduce_dtype": "bf16"}}, 8),
        ({"training": {"precision": "bf16", "reduce_dtype": "bf16"}}, 16),
        ({"training": BF16, "optimizer": {"name": "lion", "stochastic_rounding": True}}, 6),
        ({"lora": {"rank": 2}}, 4),
        ({"training": {"precision": "bf16"}, "lora": {"rank": 2}}, 2),
    ],
    ids=str,
)
def test_a_model_needs_its_weights_gradients_and_moments(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], bytes_per_parameter: int
) -> None:
    run = tiny_run(LLAMA, **{**sections, "training": {"device": "cpu", **sections.get("training", {})}})
    needed = num_parameters(run.model) * bytes_per_parameter
    monkeypatch.setattr(machine_memory.os, "sysconf", lambda name: needed if name == "SC_PHYS_PAGES" else 1)
    check_machine_memory(run)
    monkeypatch.setattr(machine_memory.os, "sysconf", lambda name: needed - 1 if name == "SC_PHYS_PAGES" else 1)
    with pytest.raises(UserError, match=r"training \[model\] takes at least"):
        check_machine_memory(run)
