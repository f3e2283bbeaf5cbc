"""Define the options of the commands that generate text and evaluate Loki."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fourfold.cli.options import StoredDtype
from fourfold.errors import UserError

if TYPE_CHECKING:
    from fourfold.inference.loki import LokiConfig

ModelName = Annotated[
    str, typer.Option("--model", metavar="DIR|ID|RUN", help="A Hugging Face model, or a run or checkpoint of fourfold.")
]
TokenizerName = Annotated[str | None, typer.Option(metavar="DIR|ID|bytes", help="Default: the model's own.")]
DtypeName = Annotated[StoredDtype, typer.Option(help="Type of the weights. auto is the stored type.")]
DeviceName = Annotated[str | None, typer.Option(help="cpu or cuda. Default: a GPU if there is one.")]
BasisFile = Annotated[
    Path | None, typer.Option(metavar="BASIS.safetensors", help="The file that `fourfold loki calibrate` wrote.")
]
LokiValues = Annotated[
    list[str],
    typer.Option(
        "--loki",
        metavar="KEY=VALUE",
        help="Options of Loki (docs/loki.md): d=32, d_f=0.25, or variance=0.9. k=2048 or k_f=0.25. min_k=128, "
        "min_seq=512, sink=4, recent=8, skip_layers=0,1. prefill=dense or simulate. basis=best, pre, or post. "
        "cache=proxy or rotated. proxy_dtype=same or bf16. kernels=auto, torch, triton, or numba. Repeatable.",
    ),
]


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
