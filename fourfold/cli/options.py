"""Define the options that several commands share, and print a command's result."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from fourfold.errors import UserError
from fourfold.planning.machines.names import machine_names

if TYPE_CHECKING:
    from fourfold.inference.loki import LokiConfig

RunFile = Annotated[Path, Argument(metavar="RUN.toml", help="The run file.")]
Overrides = Annotated[
    list[str],
    Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override a key of the run file. Repeatable. docs/run-file.md lists all keys.",
    ),
]
TASK_LIST = "`lm-eval ls tasks` lists them."
AsJson = Annotated[bool, Option("--json", help="Print JSON and nothing else.")]
TaskLimit = Annotated[int | None, Option("--limit", min=1, help="Documents per task. Default: all.")]
TaskFolder = Annotated[Path | None, Option("--include-path", help="A folder with your own tasks.")]
MACHINES = f"The path of a machine file (.toml), or one of {', '.join(machine_names())}."
SITES = "frontier, perlmutter, alps, lumi, generic, or a file of your own (.toml)"
KNOBS = (
    "Axes: x, y, z, dp, cp, pp, ep. Sizes: micro_batch_size. batch_parts: 1, 2, 4. zero: 0, 1, 2, 3. recompute: none, "
    "selective, full. stages_per_rank: 1, 2, 3, 4, 6, 8. cp_method: ring, ulysses. schedule: 1F1B, Interleaved1F1B, "
    "InterleavedZeroBubble, ZBVZeroBubble, and, searched only if named, GPipe, LoopedBFS, DualPipeV."
)
"""Help text with the knobs of a search for layouts. The user can limit the values of each knob. The module
``planning.search.limits`` parses these limits."""
StoredDtype = Literal["auto", "fp32", "bf16", "fp16"]
"""Possible values of options for the dtype of weights. auto keeps the dtype that the weights are stored in."""
ModelName = Annotated[
    str, Option("--model", metavar="DIR|ID|RUN", help="A Hugging Face model, or a run or checkpoint of fourfold.")
]
TokenizerName = Annotated[str | None, Option(metavar="DIR|ID|bytes", help="Default: the model's own.")]
DtypeName = Annotated[StoredDtype, Option(help="Dtype of the weights. auto is the stored dtype.")]
DeviceName = Annotated[str | None, Option(help="cpu or cuda. Default: a GPU if there is one.")]
TopK = Annotated[int | None, Option(help="Draw from this many of the most likely tokens.")]
TopP = Annotated[float | None, Option(help="Draw from the most likely tokens that together have this probability.")]
LokiValues = Annotated[
    list[str],
    Option(
        "--loki",
        metavar="KEY=VALUE",
        help="Options of Loki (docs/loki.md): d=32 or d_f=0.25. k=2048 or k_f=0.03. min_k=256, "
        "min_seq=512, sink=4, recent=64, bits=2, skip_layers=0,1. prefill=dense or simulate. "
        "basis=best, pre, post, or scores. kernels=auto, torch, triton, or numba. Repeatable.",
    ),
]


def show(record: dict[str, Any] | None, as_json: bool, tables: Callable[[dict[str, Any]], object]) -> None:
    """Print a record as JSON or as tables.

    Args:
        record: The command's result. If it is None, nothing is printed. Under a launcher such as torchrun, it is None
            on every process except the first.
        as_json: Whether to print JSON.
        tables: Prints the record as tables.
    """
    if record is not None:
        if as_json:
            print(json.dumps(record))
        else:
            tables(record)


def loki_config(values: Sequence[str], **defaults: Any) -> LokiConfig:
    """Parse KEY=VALUE pairs into a Loki configuration. ``defaults`` replace Loki's own defaults. Raise ``UserError``
    for a malformed pair, an unknown key, or an impossible value."""
    from fourfold.inference.loki import LokiConfig

    found = dict(defaults)
    for pair in values:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"--loki {pair} is not KEY=VALUE, such as k=2048")
        found[name] = value
    return LokiConfig(**found)
