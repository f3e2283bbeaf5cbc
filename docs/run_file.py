"""Write docs/run-file.md, the run file's reference, from the schema: python docs/run_file.py"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_origin

from annotated_types import Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fourfold.config.expected_values import section_of, type_name
from fourfold.config.model import ModelConfig
from fourfold.config.model_keys import UNSET
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.presets import PRESETS
from fourfold.config.run import RunConfig
from fourfold.run_file.load import NAMES_ELSEWHERE

PAGE = Path(__file__).with_name("run-file.md")

INTRODUCTION = """\
# The run file

<!-- Written by docs/run_file.py from the schema: change descriptions there, not here. -->

A run file describes a run in TOML. Start from [examples/laptop.toml](../examples/laptop.toml). To change a key for one
run only, use `--set`:

    fourfold train run.toml --set optimizer.lr=1e-4

Every command that reads a run file takes `--set section.key=value`. fourfold reads the value as TOML, or as a string if
it is not valid TOML. `run.toml` in the run's folder has all defaults and overrides. In the column *default*, *none*
means that the key is not set.

The sections are [model](#model), [data](#data), [masks](#masks), [moe](#moe), [parallel](#parallel),
[overlap](#overlap), [training](#training), [activation_checkpoint](#activation_checkpoint), [optimizer](#optimizer),
[lora](#lora), [dpo](#dpo), [ema](#ema), [loss_scaling](#loss_scaling), [lr_scheduler](#lr_scheduler),
[checks](#checks), [checkpoint](#checkpoint), [fault_tolerance](#fault_tolerance), [metrics](#metrics),
[validation](#validation), [evaluation](#evaluation), [audit](#audit), and [sample](#sample). Only `[model]`, `[data]`,
and `[training]` have required keys, and a preset fills in `[model]`. The [presets](#presets) and the [names that other
frameworks use](#names-elsewhere) are at the end.
"""


def reference() -> str:
    """Return the page as Markdown."""
    top = {name: field for name, field in RunConfig.model_fields.items() if section_of(field.annotation) is None}
    parts = [INTRODUCTION, "## Top level\n", _table(top)]
    for name, field in RunConfig.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts += [f"## [{name}]\n", *_paragraph(section), _table(section.model_fields)]
            for title, inner in _inner_sections(name, section):
                parts += [f"### {title}\n", *_paragraph(inner), _table(inner.model_fields)]
    parts += ["## Presets\n", _presets(), "## Names elsewhere\n", _elsewhere()]
    return "\n".join(parts)


def _paragraph(section: type[BaseModel]) -> list[str]:
    return [inspect.cleandoc(section.__doc__) + "\n"] if section.__doc__ else []


def _inner_sections(name: str, section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield each table that a section contains, with a title that names the table's keys. If several keys have the same
    kind of table, yield it once."""
    places: dict[type[BaseModel], list[str]] = {}
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            places.setdefault(inner, []).append(f"{name}.{key}")
    for inner, keys in places.items():
        is_list = get_origin(section.model_fields[keys[0].partition(".")[2]].annotation) is list
        yield ("Each of " + " and ".join(keys) if is_list else f"[{keys[0]}]"), inner


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        cells = (
            f"`{name}`",
            type_name(field.annotation, field.metadata),
            _default(field),
            " ".join((field.description or "").split()),
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if isinstance(field.default, BaseModel):
        return "see below"
    if field.default is None or (field.default == UNSET and Gt(0) in field.metadata):
        return "none"
    return f"`{json.dumps(field.default)}`"


def _presets() -> str:
    rows = ["| preset | parameters | layers | hidden | heads | kv heads | MLP width | vocabulary |", "|---" * 8 + "|"]
    for name, sizes in PRESETS.items():
        model = ModelConfig(**sizes)
        numbers = (
            model.num_hidden_layers,
            model.hidden_size,
            model.num_attention_heads,
            model.num_key_value_heads,
            model.intermediate_size,
            model.vocab_size,
        )
        rows.append(" | ".join([f"| `{name}`", _count(num_parameters(model)), *map(str, numbers)]) + " |")
    return "\n".join(rows) + "\n"


def _count(number: int) -> str:
    """Format a count with three significant digits and a unit: 1.23M."""
    unit, name = next(
        (unit, name) for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")) if number >= unit
    )
    return f"{number / unit:.3g}{name}"


def _elsewhere() -> str:
    rows = [
        "fourfold does not accept the names in the second column. Its error message says which key to use instead.\n",
        "| key in fourfold | names in other programs |",
        "|---|---|",
    ]
    rows += [f"| {ours} | {', '.join(f'`{name}`' for name in theirs)} |" for ours, theirs in NAMES_ELSEWHERE.items()]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
