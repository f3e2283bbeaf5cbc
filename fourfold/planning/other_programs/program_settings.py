"""Translate the settings of another training program into the columns of a measured row (``calibration.columns``).

``settings.toml`` has the meaning of each setting.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fourfold.config.expected_values import mistake
from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.errors import UserError
from fourfold.planning.calibration.columns import MeasuredRow, parse_cells
from fourfold.planning.calibration.rows import GPT_VOCABULARY
from fourfold.planning.other_programs.settings_file import read_settings, setting_text

TABLES = tomllib.loads((files("fourfold.planning.other_programs") / "settings.toml").read_text(encoding="utf-8"))
GIVEN_BY = {
    "layers": "--model",
    "machine": "--machine",
    "gpus": "--gpus",
    "seq_len": "--seq",
    "global_batch": "--global-batch",
}
"""Columns that a prediction needs, each with the option that gives it."""


def read_program(
    path: Path, given: Mapping[str, str], model: ModelConfig | None = None
) -> tuple[MeasuredRow, ModelConfig, dict[str, list[str]]]:
    """Read the configuration of another training program.

    Args:
        path: The file.
        given: Columns that replace those of the file.
        model: The model. Default: the preset with the name of the file's model, or the sizes in the file.

    Returns:
        The run as a row, the model, and lists. The lists are the columns that were ``read`` and ``assumed``, the
        settings ``without_effect`` on the prediction (such as the learning rate), the settings ``not_understood``, and
        the ``conditions_not_checked`` of a script.

    Raises:
        UserError: The file is invalid, its program is unknown, or it does not give a column that a prediction needs.
    """
    settings, conditions = read_settings(path)
    programs = TABLES["programs"].values()
    table = next((table for table in programs if any(_named(mark, settings) for mark in table["marks"])), None)
    if table is None:
        marks = " or ".join(table["marks"][0] for table in programs)
        raise UserError(f"--from {path} is of no known program; give a file with a setting such as {marks}")
    found, understood = _columns(table["settings"], settings)
    name = " ".join(found.pop(key) for key in ("model", "flavor") if key in found).lower()
    preset = next((preset for pattern, preset in TABLES["presets"].items() if fnmatch(name, pattern)), None)
    model = model or (ModelConfig.model_validate(PRESETS[preset]) if preset else None)
    found |= {**(_sizes(model) if model else {}), **given}
    columns = _complete({**table["defaults"], **found})
    if missing := [column for column in GIVEN_BY if column not in columns]:
        of_model, options = f" of {name}" if name else "", " ".join(GIVEN_BY[column] for column in missing)
        raise UserError(f"--from {path} does not give {', '.join(missing)}{of_model}; add {options}")
    try:
        row = parse_cells(columns)
        model = model or _model_of(row)
    except ValueError as error:
        problem = mistake(error.errors()[0], ModelConfig) if isinstance(error, ValidationError) else error
        raise UserError(f"--from {path}: {problem}; change the file, or give --gpus or --model") from None
    others = [name for name in settings if name not in understood]
    known = {name for key in table["settings"] for name in _named(key, settings)}
    idle = [name for name in others if name not in known and _is_without_effect(name)]
    is_assumed = {column: column in table["defaults"] and column not in found for column in columns}
    return row, model, {
        "read": [f"{column} = {text}" for column, text in columns.items() if not is_assumed[column]],
        "assumed": [f"{column} = {text}" for column, text in columns.items() if is_assumed[column]],
        "without_effect": idle,
        "not_understood": [f"{name} = {settings[name]}" for name in others if name not in idle],
        "conditions_not_checked": conditions,
    }  # fmt: skip


def _is_without_effect(name: str) -> bool:
    return any(
        fnmatch(part, pattern) for part in (name, name.rpartition(".")[2]) for pattern in TABLES["without_effect"]
    )


def _named(key: str, settings: Mapping[str, str]) -> list[str]:
    """Return the names of the settings that a key of the tables stands for."""
    return [name for name in settings if key in (name, name.rpartition(".")[2])]


def _columns(meanings: Mapping[str, Any], settings: Mapping[str, str]) -> tuple[dict[str, str], set[str]]:
    """Return the columns that the settings set, and the names of the settings that were understood."""
    columns: dict[str, str] = {}
    understood = set()
    for name, meaning in ((name, meaning) for key, meaning in meanings.items() for name in _named(key, settings)):
        value = settings[name]
        change = meaning if isinstance(meaning, str) else meaning.get(value.lower(), meaning.get("*"))
        if change is not None and "$" not in value:
            columns |= {change: value} if isinstance(change, str) else change
            understood.add(name)
    return columns, understood


def _sizes(model: ModelConfig) -> dict[str, str]:
    """Return the columns with the sizes of a model."""
    more = (("sliding_layers", model.sliding_layers), ("linear_layers", model.linear_layers))
    of_experts = () if model.num_experts else ("num_experts_per_tok", "moe_intermediate_size")
    pairs = ((key, value) for key, value in (*model, *more) if key not in of_experts and (value or value is False))
    return _columns(TABLES["model"], {key: setting_text(value) for key, value in pairs})[0]


def _model_of(row: MeasuredRow) -> ModelConfig:
    """Return the model with the sizes of a row."""
    sizes = ((key, getattr(row, column, None)) for key, column in TABLES["model"].items() if isinstance(column, str))
    tied = row.mlp in ("gelu", "geglu") if row.tie_word_embeddings is None else row.tie_word_embeddings
    more: dict[str, Any] = {"mlp": "relu2" if row.mlp == "sqrelu" else row.mlp, "tie_word_embeddings": tied}
    more["vocab_size"] = int(row.vocab or GPT_VOCABULARY)
    more |= {"qk_nope_head_dim": int((row.head_dim or 0) - (row.qk_rope_head_dim or 0))} if row.kv_lora_rank else {}
    return ModelConfig.model_validate({key: int(size) for key, size in sizes if size} | more)


def _complete(columns: dict[str, str]) -> dict[str, str]:
    """Compute missing columns with the formulas in the tables, and remove names that are no columns."""
    numbers = {name: float(text) for name, text in columns.items() if re.fullmatch(r"\d{1,12}(\.\d+)?", text)}
    if numbers.get("pp", 1) > 1 and "pipeline_micro_batch" in numbers:
        numbers["micro_batch"] = numbers["pipeline_micro_batch"]
    pattern = columns.get("expert_layer_pattern", "1")
    zeros = [int(times or 1) for times in re.findall(r"\b0\b\]?(?:\*(\d{1,9}))?", pattern)]
    numbers |= {"expert_layer_every": int(pattern)} if pattern.isdecimal() else {"dense_layers": sum(zeros)}
    for column, terms in TABLES["formulas"]:
        with suppress(ValueError, ZeroDivisionError):  # A name in the formula is unknown.
            value = sum((_product(term, numbers) for term in terms.split(" + ")), 0.0)
            numbers |= {column: value} if column not in {*columns, *numbers} and value.is_integer() else {}
    texts = columns | {name: f"{value:.15g}" for name, value in numbers.items()}
    unused = () if "experts" in columns else tuple(name for name in texts if name.startswith("expert"))
    return {name: text for name, text in texts.items() if name in MeasuredRow.model_fields and name not in unused}


def _product(term: str, numbers: Mapping[str, float]) -> float:
    value = 1.0
    for sign, name in re.findall(r"(/{0,2})([\w-]+)", term):
        number = numbers[name] if name in numbers else float(name)
        value = value // number if sign == "//" else value / number if sign else value * number
    return value
