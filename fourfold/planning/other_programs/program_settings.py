"""Translate the settings of another training program into the columns of a measured row (``calibration.columns``).

A *measured row* describes one training run, and each column is one property of the run (docs/measured-rows.md). The
file ``settings.toml`` says which column each setting means.
"""

import re
import tomllib
from collections.abc import Container, Mapping
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
from fourfold.planning.other_programs.settings_file import PARSERS, read_settings, setting_text

TABLES = tomllib.loads((files("fourfold.planning.other_programs") / "settings.toml").read_text(encoding="utf-8"))


def read_program(
    path: Path, given: Mapping[str, str], model: ModelConfig | None = None
) -> tuple[MeasuredRow, ModelConfig, dict[str, list[str]]]:
    """Read the configuration of another training program.

    Args:
        path: Path of the configuration.
        given: Values by column of a measured row. They replace the values from the file.
        model: The model. Default: the preset with the name of the file's model, or the sizes in the file.

    Returns:
        The run as a row, the model, and five lists by name. The list "assumed" has the columns that are defaults, or
        are computed from defaults. The list "read" has all other columns. The list "without_effect" has settings that
        do not change the prediction, such as the learning rate. The list "not_understood" has unknown settings. The
        list "conditions_not_checked" has what ``shell_script.read_options`` did not check in a script.

    Raises:
        UserError: The file is invalid, its program is unknown, or it does not give a column that a prediction needs.
    """
    settings, conditions = read_settings(path)
    programs = TABLES["programs"].values()
    table = next((table for table in programs if any(_named(mark, settings) for mark in table["marks"])), None)
    if table is None:
        marks = " or ".join(table["marks"][0] for table in programs)
        raise UserError(f"--from {path} belongs to no known program; give a file with a setting such as {marks}")
    replaced = {name for column in given for name in (column, *TABLES["replaced"].get(column, ()))}
    # Megatron-LM ignores some options of a script if a flag is not given.
    needs = table.get("needs", {}) if path.suffix not in PARSERS else {}
    idle = [name for name, flag in needs.items() if name in settings and settings.get(flag) != "true"]
    assumed = set(table["defaults"])
    try:
        used = {name: value for name, value in settings.items() if name not in idle}
        found, understood = _columns(table["settings"], used, replaced)
        name = " ".join(found.pop(key) for key in ("model", "flavor") if key in found).lower()
        preset = next((preset for pattern, preset in TABLES["presets"].items() if fnmatch(name, pattern)), None)
        model = model or (ModelConfig.model_validate(PRESETS[preset]) if preset else None)
        found = {name: value for name, value in found.items() if name not in replaced}
        found |= {**(_sizes(model) if model else {}), **given}
        assumed -= found.keys()
        columns = _complete({**table["defaults"], **found}, assumed)
        if missing := [column for column in TABLES["given_by"] if column not in columns]:
            options, of_model = " ".join(TABLES["given_by"][each] for each in missing), f" of {name}" if name else ""
            raise ValueError(f"the file does not give {', '.join(missing)}{of_model}; add {options}")
        row = parse_cells(columns)
        model = model or _model_of(row)
    except ValueError as error:
        problem = mistake(error.errors()[0], ModelConfig) if isinstance(error, ValidationError) else str(error)
        raise UserError(
            f"--from {path}: {problem}{'' if ';' in problem else '; change the file or the options'}"
        ) from None
    others = [name for name in settings if name not in understood]
    known = {name for key in table["settings"] for name in _named(key, settings)}
    idle += [name for name in others if name not in {*known, *idle} and _is_without_effect(name)]
    return row, model, {
        "read": [f"{column} = {text}" for column, text in columns.items() if column not in assumed],
        "assumed": [f"{column} = {text}" for column, text in columns.items() if column in assumed],
        "without_effect": idle,
        "not_understood": [f"{name} = {settings[name]}" for name in others if name not in idle],
        "conditions_not_checked": conditions,
    }  # fmt: skip


def _is_without_effect(name: str) -> bool:
    return any(
        fnmatch(part, pattern) for part in (name, name.rpartition(".")[2]) for pattern in TABLES["without_effect"]
    )


def _named(key: str, settings: Mapping[str, str]) -> list[str]:
    """Return the names of the settings that ``key`` matches. A key of ``settings.toml`` matches a setting's full name,
    or the part of the name after the last dot."""
    return [name for name in settings if key in (name, name.rpartition(".")[2])]


def _columns(
    meanings: Mapping[str, Any], settings: Mapping[str, str], replaced: Container[str] = ()
) -> tuple[dict[str, str], set[str]]:
    """Return the columns that the settings set, and the names of the settings that were understood.

    Raises:
        ValueError: The value of a column is not a number, or two settings contradict each other. The values of
            ``replaced`` columns are not checked.
    """
    columns: dict[str, str] = {}
    understood = set()
    for name, meaning in ((name, meaning) for key, meaning in meanings.items() for name in _named(key, settings)):
        value = settings[name]
        if isinstance(meaning, str):
            is_number = re.fullmatch(r"\d[\d.]*", value)
            if not is_number and meaning not in TABLES["words"] and meaning not in replaced:
                raise ValueError(f"{name} = {value} is not a number")
            if meaning in TABLES["once"] and columns.get(meaning, value) != value:
                raise ValueError(f"{name} = {value}, but another setting says {columns[meaning]}")
            change = {meaning: value} if is_number or (meaning in TABLES["words"] and "$" not in value) else None
        else:
            # A flag has no value. If a word such as $EXTRA_ARGS follows a flag in a shell script, the word is not the
            # flag's value.
            is_flag = value.startswith("$") and "true" in meaning
            change = (
                meaning["true"] if is_flag else meaning.get(value.lower(), None if "$" in value else meaning.get("*"))
            )
        if change is not None:
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


def _complete(columns: dict[str, str], assumed: set[str]) -> dict[str, str]:
    """Compute missing columns with the formulas of ``settings.toml``, and remove names that are not columns.

    Args:
        columns: Texts by column, or by another name in the formulas.
        assumed: Names of columns that are defaults. This function adds the columns that it computes from defaults.

    Raises:
        ValueError: Columns contradict each other.
    """
    numbers = {name: float(text) for name, text in columns.items() if re.fullmatch(r"\d{1,12}(\.\d+)?", text)}
    if numbers.get("pp", 1) > 1 and "pipeline_micro_batch" in numbers:
        numbers["micro_batch"] = numbers["pipeline_micro_batch"]
    numbers |= _expert_layers(columns.get("expert_layer_pattern", "1"))
    # The global batch follows from a rank's batch only if the number of micro-batches per step is known.
    certain = {"dp", "gpus"} | ({"global_batch"} if "accumulation" in columns.keys() - assumed else set())
    for column, terms in TABLES["formulas"]:
        with suppress(KeyError, ZeroDivisionError):  # A name in the formula is unknown.
            value = sum((_product(term, numbers) for term in terms.split(" + ")), 0.0)
            names = {column, *re.findall(r"[a-z]\w*", terms)}
            if column not in {*columns, *numbers} and value.is_integer():
                numbers[column] = value
                assumed |= {column} if any(numbers[name] != 1 for name in names & assumed) else set()
            elif column in certain and numbers[column] != value and not names & assumed:
                raise ValueError(f"{column} = {numbers[column]:g}, but {terms.replace(' ', ' · ')} = {value:g}")
    for term in TABLES["whole"]:
        with suppress(KeyError, ZeroDivisionError):
            if not _product(term, numbers).is_integer():
                figures = ", ".join(f"{name} = {numbers[name]:g}" for name in re.findall(r"\w+", term))
                raise ValueError(f"{term} is not a whole number ({figures})")
    texts = columns | {name: f"{value:.15g}" for name, value in numbers.items()}
    unused = () if "experts" in columns else tuple(name for name in texts if name.startswith("expert"))
    return {name: text for name, text in texts.items() if name in MeasuredRow.model_fields and name not in unused}


def _expert_layers(pattern: str) -> dict[str, float]:
    """Parse a pattern that says which layers have experts, and return an input of the formulas by its name.

    If the pattern is a number n, every n-th layer has experts, and the result is n. If the pattern is a list of zeros
    and ones, the ones are layers with experts, and the result is the number of zeros.
    """
    if pattern.isdecimal():
        return {"expert_layer_every": int(pattern)}
    # ``setting_text`` has removed the brackets of a list from a YAML file.
    listed = f"[{pattern.replace(' ', ',')}]" if re.fullmatch(r"[01]([ ,][01])+", pattern) else pattern
    text = listed.replace(" ", "").strip("()")
    lists = re.findall(r"(\[[01](?:,[01])*\])(\*\d{1,4})?", text)
    if "+".join(map("".join, lists)) != text:
        raise ValueError(f"{pattern} is not a pattern of layers, such as [0]*3+[1]*29")
    return {"dense_layers": sum(layers.count("0") * int(times[1:] or 1) for layers, times in lists)}


def _product(term: str, numbers: Mapping[str, float]) -> float:
    value = 1.0
    for sign, name in re.findall(r"(/{0,2})([\w-]+)", term):
        number = float(name) if re.fullmatch(r"-?\d+", name) else numbers[name]
        value = value // number if sign == "//" else value / number if sign else value * number
    return value
