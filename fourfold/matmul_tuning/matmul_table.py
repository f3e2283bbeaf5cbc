"""Read and write this machine's table of the fastest matmul layouts, a file in the user's cache directory."""

import hashlib
import json
import os
import platform
import re
from pathlib import Path

import torch
from pydantic import Field, field_validator

from fourfold.config.layout import MatmulSizes
from fourfold.config.strict import Strict
from fourfold.data.atomic_files import write_output, writing
from fourfold.errors import UserError
from fourfold.parallel.tensor.matmul_layouts import LayerLayout

PRODUCTS = tuple(name for name in LayerLayout.model_fields if name != "turned")
"""Names of a linear layer's three matmuls."""


class Gain(Strict):
    """The measured time of one matmul, and how much faster the chosen layout is than the default layout. A *round* of
    the measurement times each compared layout once."""

    seconds: float = Field(gt=0)
    """Seconds with the default layout."""
    gain: float = Field(gt=0)
    """Seconds with the default layout divided by seconds with the chosen layout, as the median over the rounds."""
    low: float = Field(gt=0)
    """Lower quartile of this gain over the rounds."""
    high: float = Field(gt=0)
    """Upper quartile of this gain over the rounds."""


class TunedLayer(Strict):
    """The chosen layouts of a linear layer's three matmuls. ``gains`` has the gain of each matmul, by name."""

    layout: LayerLayout
    gains: dict[str, Gain]
    other_order: float = Field(gt=0)
    """A weight has two possible memory orders. This is the combined gain of the three matmuls with the order that was
    not chosen."""

    @field_validator("gains")
    @classmethod
    def _has_every_matmul(cls, gains: dict[str, Gain]) -> dict[str, Gain]:
        if set(gains) != set(PRODUCTS):
            raise ValueError(f"gains must have the keys {', '.join(PRODUCTS)}")
        return gains

    @property
    def gain(self) -> float:
        """Return the combined gain of the three matmuls: their total seconds with the default layouts, divided by their
        total seconds with the chosen layouts."""
        return sum(each.seconds for each in self.gains.values()) / sum(e.seconds / e.gain for e in self.gains.values())


class MatmulTable(Strict):
    """The tuned layers of one machine, by dtype and sizes (``key_of``)."""

    machine: str
    layers: dict[str, TunedLayer]


def key_of(sizes: MatmulSizes, dtype: torch.dtype) -> str:
    """Return a layer's key in ``MatmulTable.layers``."""
    return f"{str(dtype).removeprefix('torch.')} {sizes.tokens}x{sizes.outputs}x{sizes.inputs}"


def machine_of(device: torch.device) -> str:
    """Return a text that names everything that determines the speed of a matmul: the device, the versions of the
    libraries, and on a CPU the number of threads."""
    library = f"torch {torch.__version__}"
    if device.type == "cuda":
        version = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        blas = str(torch.backends.cuda.preferred_blas_library()).rpartition(".")[2]
        precision = torch.get_float32_matmul_precision()
        return f"{torch.cuda.get_device_name(device)}; {library}; {version}, {blas}, float32 {precision}"
    libraries = re.findall(r"(?:Math Kernel Library|MKL-DNN|BLAS_INFO)\W+(?:Version )?[\w.-]+", torch.__config__.show())
    threads = torch.get_num_threads()
    return f"{_processor()}; {library}; {', '.join(libraries)}; {threads} thread{'s' if threads > 1 else ''}"


def _processor() -> str:
    """Return the processor's name. ``platform.processor`` returns this name only on some systems."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def table_file(machine: str) -> Path:
    """Return the path of a machine's table in $XDG_CACHE_HOME/fourfold or ~/.cache/fourfold. Raise ``UserError`` if the
    user has no home directory."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        raise UserError("this user has no home directory for a cache; set XDG_CACHE_HOME to a folder") from None
    return folder / "fourfold" / f"products-{hashlib.sha256(machine.encode()).hexdigest()[:16]}.json"


def read_table(machine: str) -> MatmulTable:
    """Return a machine's table. The table is empty if there is no file. Raise ``UserError`` if the file is damaged,
    cannot be read, or belongs to another machine."""
    file = table_file(machine)
    try:
        text = file.read_bytes()
    except FileNotFoundError:
        return MatmulTable(machine=machine, layers={})
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; remove it, and measure again") from None
    try:
        table = MatmulTable.model_validate_json(text)
    except ValueError:
        raise UserError(
            f"{file} is damaged: it is not a table of tuned matmuls; remove it, and measure again"
        ) from None
    if table.machine != machine:
        raise UserError(f"{file} belongs to another machine, {table.machine}; remove it, and measure again")
    return table


def write_table(table: MatmulTable) -> Path:
    """Write a table to its machine's file, and return the file's path. Raise ``UserError`` if the file cannot be
    written."""
    file = table_file(table.machine)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_output(file, json.dumps(table.model_dump(exclude_defaults=True), indent=1) + "\n")
    return file
