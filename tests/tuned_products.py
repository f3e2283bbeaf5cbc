"""Force matmul layouts that a measurement would not choose for a tiny model, so that tests cover all layouts."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fourfold.config.layout import matmul_sizes
from fourfold.config.run import RunConfig
from fourfold.matmul_tuning.matmul_table import PRODUCTS, Gain, MatmulTable, TunedLayer, key_of, machine_of, write_table
from fourfold.models.dtypes import DTYPES
from fourfold.parallel.tensor.matmul_layouts import Copies, LayerLayout
from fourfold.verification.not_compared import Against
from fourfold.verification.parity import as_verified, parity, resharded
from fourfold.verification.parity_report import ParityReport

LAYOUTS = (
    LayerLayout(turned=True),
    LayerLayout(output=Copies(right="turned"), weight_gradient=Copies(left="turned and padded")),
    LayerLayout(
        turned=True,
        output=Copies(right="turned and padded"),
        input_gradient=Copies(left="padded", right="turned"),
        weight_gradient=Copies(left="padded", right="padded"),
    ),
    LayerLayout(turned=True, input_gradient=Copies(right="padded"), weight_gradient=Copies(right="turned")),
    LayerLayout(output=Copies(left="padded"), input_gradient=Copies(right="turned and padded")),
)
EVEN = dict.fromkeys(PRODUCTS, Gain(seconds=1, gain=1, low=1, high=1))


def parity_on_cpu(run: RunConfig, steps: int = 3, against: Against = "plain") -> ParityReport | None:
    """Run ``parity``. If the run uses tuned matmul layouts, force these layouts, also on the grid that resumes."""
    verified = as_verified(run, steps)
    with forced_layouts(verified, resharded(verified)):
        return parity(run, torch.device("cpu"), steps, against)


@contextmanager
def forced_layouts(*runs: RunConfig) -> Iterator[None]:
    """Run the block with a file of layouts in the cache directory, which rank 0 reads. The file has a layout for every
    matmul of these runs. If the runs do not use tuned layouts, do nothing.
    """
    tuned = [run for run in runs if run.training.tuned_products != "off"]
    if not tuned:
        yield
        return
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(Path(tuned[0].output_dir) / "cache")
    keys = [key_of(s, DTYPES[run.training.precision]) for run in tuned for s in matmul_sizes(run).values()]
    layers = zip(dict.fromkeys(keys), itertools.cycle(LAYOUTS))
    table = {key: TunedLayer(layout=layout, gains=EVEN, other_order=1.0) for key, layout in layers}
    write_table(MatmulTable(machine=machine_of(torch.device("cpu")), layers=table))
    try:
        yield
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before
