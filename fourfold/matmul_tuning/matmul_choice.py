"""Choose the memory layouts of a run's matmuls from this machine's table, or by measuring. All processes use the choice
of rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch

from fourfold.config.layout import MatmulSizes, matmul_sizes
from fourfold.config.run import RunConfig
from fourfold.matmul_tuning.matmul_table import TunedLayer, key_of, machine_of, read_table, write_table
from fourfold.matmul_tuning.matmul_times import tune_layer
from fourfold.models.dtypes import DTYPES
from fourfold.parallel.grid.shared_failure import decided_by_rank_0
from fourfold.parallel.tensor.matmul_layouts import LayerLayout, Layouts


def agreed_layouts(run: RunConfig, device: torch.device) -> Layouts:
    """Return rank 0's layouts on every process, because ranks that share a weight must store it in the same way.

    The result has only the layouts that differ from the default. It is empty if ``training.tuned_products`` is off.

    Raises:
        UserError: The table of this machine is damaged, or cannot be read or written.
    """
    if run.training.tuned_products == "off":
        return {}
    return decided_by_rank_0(lambda: _layouts(run, device))


def _layouts(run: RunConfig, device: torch.device) -> Layouts:
    dtype = DTYPES[run.training.precision]
    if run.training.tuned_products == "measured":
        layers: Mapping[MatmulSizes, TunedLayer] = tuned_layers(run, dtype, device)
    else:
        table = read_table(machine_of(device))
        sizes = set(matmul_sizes(run).values())
        layers = {each: table.layers[key] for each in sizes if (key := key_of(each, dtype)) in table.layers}
        if len(layers) < len(sizes):
            print(
                f"warning: {len(sizes) - len(layers)} of the {len(sizes)} sizes of this run's products are not in this "
                "machine's table, and are computed as stored; `fourfold machine tune-matmul` measures them",
                file=sys.stderr,
            )
    tuned = {(each.outputs, each.inputs): layer.layout for each, layer in layers.items()}
    return {shape: layout for shape, layout in tuned.items() if layout != LayerLayout()}


def tuned_layers(
    run: RunConfig, dtype: torch.dtype, device: torch.device, again: bool = False
) -> dict[MatmulSizes, TunedLayer]:
    """Return the tuned layers for the matmul sizes of a run. Sizes that are not in the machine's table are measured and
    added to it.

    Args:
        run: The run.
        dtype: The matmuls' dtype.
        device: The device to measure on.
        again: Whether to also measure sizes that are already in the table.
    """
    machine = machine_of(device)
    layers = {}
    for sizes in dict.fromkeys(matmul_sizes(run).values()):
        key = key_of(sizes, dtype)
        table = read_table(machine)  # Another process may have written to the table in the meantime.
        if again or key not in table.layers:
            table.layers[key] = tune_layer(sizes, dtype, device)
            write_table(table)
        layers[sizes] = table.layers[key]
    return layers
