"""Measure a run file's matmuls on this machine for ``fourfold machine tune-matmul``, and return a record."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from fourfold.config.layout import MatmulSizes, matmul_sizes
from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.launch.job_processes import choose_device
from fourfold.matmul_tuning.matmul_choice import tuned_layers
from fourfold.matmul_tuning.matmul_table import TunedLayer, machine_of, table_file
from fourfold.models.dtypes import DTYPES
from fourfold.processes import available_cores


def tune_matmuls(run: RunConfig, again: bool) -> dict[str, Any]:
    """Measure those matmuls of one rank that are not in this machine's table, and return a record of all of them.

    On a CPU, a rank uses the number of threads that ``fourfold train`` gives it on this machine: OMP_NUM_THREADS, or
    its share of the cores.

    Args:
        run: The run.
        again: Whether to also measure sizes that are already in the table.
    """
    device = choose_device(Place(0, 0, 1, 1, launcher="local"), run.training.device)
    if device.type == "cpu" and not os.environ.get("OMP_NUM_THREADS"):  # torch obeys OMP_NUM_THREADS.
        torch.set_num_threads(max(1, available_cores() // run.parallel.world_size))
    layers = tuned_layers(run, DTYPES[run.training.precision], device, again)
    machine = machine_of(device)
    return {
        "machine": machine,
        "file": str(table_file(machine)),
        "precision": run.training.precision,
        "layers": layer_records(matmul_sizes(run), layers),
    }


def layer_records(names: Mapping[str, MatmulSizes], layers: Mapping[MatmulSizes, TunedLayer]) -> list[dict[str, Any]]:
    """Return one record per matmul size, with the names of the layers that have this size."""
    return [
        {
            "layers": [name for name, own in names.items() if own == sizes],
            **sizes._asdict(),
            "turned": tuned.layout.turned,
            "gain": tuned.gain,
            "other_order": tuned.other_order,
            "products": {
                matmul: {"copies": getattr(tuned.layout, matmul).describe(), **gain.model_dump()}
                for matmul, gain in tuned.gains.items()
            },
        }
        for sizes, tuned in layers.items()
    ]
