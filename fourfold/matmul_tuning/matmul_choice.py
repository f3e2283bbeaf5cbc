"""Choose how the operands of a run's matmuls are stored in memory. The choice is called a *layout*. It comes from this
machine's table or from new measurements, and rank 0 chooses for all processes."""

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from fourfold.config.layout import MatmulSizes, matmul_sizes
from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.launch.job_processes import choose_device
from fourfold.matmul_tuning.matmul_table import TunedLayer, key_of, machine_of, read_table, table_file, write_table
from fourfold.matmul_tuning.matmul_times import tune_layer
from fourfold.models.dtypes import DTYPES
from fourfold.parallel.grid.shared_failure import decided_by_rank_0
from fourfold.parallel.tensor.matmul_layouts import LayerLayout, Layouts
from fourfold.processes import available_cores


def agreed_layouts(run: RunConfig, device: torch.device) -> Layouts:
    """Return the memory layouts of the run's matmuls. Rank 0 chooses them for all processes, because ranks that share a
    weight must store it in the same way.

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
                f"warning: {len(sizes) - len(layers)} of the {len(sizes)} matmul sizes of this run are not in this "
                "machine's table, so they use the default layout; `fourfold machine tune-matmul` measures them",
                file=sys.stderr,
            )
    tuned = {(each.outputs, each.inputs): layer.layout for each, layer in layers.items()}
    return {shape: layout for shape, layout in tuned.items() if layout != LayerLayout()}


def tuned_layers(
    run: RunConfig, dtype: torch.dtype, device: torch.device, again: bool = False
) -> dict[MatmulSizes, TunedLayer]:
    """Return the tuned layouts for the matmul sizes of a run. Measure sizes that are not in the machine's table, and
    add the results to the table.

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


def tune_matmuls(run: RunConfig, again: bool) -> dict[str, Any]:
    """Return a record of the tuned layouts of all matmuls of one rank. First measure the matmuls that are not in this
    machine's table.

    On a CPU, the rank uses as many threads as ``fourfold train`` gives a rank on this machine: OMP_NUM_THREADS, or the
    number of cores divided by the number of ranks.

    Args:
        run: The run.
        again: Whether to also measure sizes that are already in the table.
    """
    device = choose_device(Place(0, 0, 1, 1, launcher="local"), run.training.device)
    # If OMP_NUM_THREADS is set, torch already obeys it.
    if device.type == "cpu" and not os.environ.get("OMP_NUM_THREADS"):
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
    """Return one record per matmul size, with its layouts and gains, and with the names of the layers of this size."""
    records: list[dict[str, Any]] = []
    for sizes, tuned in layers.items():
        record = {"layers": [name for name, own in names.items() if own == sizes], **sizes._asdict()}
        record |= {"turned": tuned.layout.turned, "gain": tuned.gain, "other_order": tuned.other_order, "products": {}}
        for matmul, gain in tuned.gains.items():
            copies = getattr(tuned.layout, matmul).describe()
            record["products"][matmul] = {"copies": copies, **gain.model_dump()}
        records.append(record)
    return records
