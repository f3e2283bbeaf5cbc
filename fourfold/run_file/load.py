"""Read a run file, apply overrides, and report every mistake in one sentence."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from fourfold.config.expected_values import key_at, mistake, section_of
from fourfold.config.layout import check_layout
from fourfold.config.parameter_counts import check_countable
from fourfold.config.presets import with_preset
from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.huggingface.architectures.config_json import check_length, from_huggingface
from fourfold.parsing import parse_toml
from fourfold.untrusted_files import read_text_file

NAMES_ELSEWHERE = tomllib.loads((files("fourfold.run_file") / "names_elsewhere.toml").read_text(encoding="utf-8"))
"""Maps some of fourfold's keys to the names that other frameworks use for them."""

CLOSE_SPELLING = 0.75
"""An error message about an unknown key suggests a known key if the two names have at least this similarity (difflib).
For example, the similarity of seq_lenght and seq_length is 0.9, and the similarity of streaming and train is 0.71."""


UNKNOWN = "extra_forbidden"
"""pydantic's error type for an unknown key."""


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the run that a TOML file and overrides describe.

    Args:
        path: Path of the run file.
        overrides: Overrides of the file's values, as ``section.key=value``.

    Raises:
        UserError: The file cannot be read, or a key or value in it or in an override is wrong.
    """
    table = read_table(Path(path))
    for override in overrides:
        apply_override(table, override)
    return make_run(table, str(path), overrides)


def read_table(path: Path) -> dict[str, Any]:
    """Return the content of a run file as nested tables, without validation. Raise ``UserError`` if the file cannot be
    read or is not valid TOML."""
    text = read_text_file(path, "the run file", "give a TOML file")
    try:
        return parse_toml(text)
    except ValueError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def make_run(table: Mapping[str, Any], where: str = "the run", overrides: Sequence[str] = ()) -> RunConfig:
    """Validate a run that is given as nested tables, and return the run.

    Args:
        table: The run file's keys and sections. Overrides have been applied already.
        where: Where the tables come from, for error messages.
        overrides: The applied overrides, for error messages.

    Raises:
        UserError: A key or value is wrong. The message names the override that sets it, or ``where`` if no override
            does.
    """
    table = dict(table)
    if isinstance(table.get("model"), dict):
        table["model"] = with_preset(from_huggingface(table["model"]))
    try:
        run = RunConfig.model_validate(table)
    except ValidationError as error:
        mistakes = error.errors()
        first = next((m for m in mistakes if m["type"] == UNKNOWN), mistakes[0])
        place, unknown = _place(first), first["type"] == UNKNOWN
        text = f"unknown key '{place}'; {_nearest(first['loc'])}" if unknown else mistake(first, RunConfig)
        if more := len(set(map(_place, mistakes))) - 1:
            text += f" (and {more} more mistake{'s' if more > 1 else ''})"
        source = next((f"--set {given}" for given in reversed(overrides) if _sets(given, place, unknown)), where)
        raise UserError(f"{source}: {text}") from None
    check_layout(run)
    check_countable(run.model)
    if run.model.from_hf is not None:
        check_length(run.model.from_hf, run.model.max_position_embeddings, run.training.seq_length)
    return run


def apply_override(table: dict[str, Any], override: str) -> None:
    """Apply an override ``section.key=value`` to nested tables. The value is parsed as TOML, or used as a string if it
    is not valid TOML. Raise ``UserError`` if the override does not have the form ``section.key=value``."""
    key, equals, text = override.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not name:
        raise UserError(f"--set {override}: write it as section.key=value, for example --set parallel.x=2")
    try:
        value = parse_toml(f"value = {text}")["value"]
    except ValueError:
        value = text.strip()
    for depth, section in enumerate(sections, start=1):
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {override}: {'.'.join(sections[:depth])} is a key, not a section; give its value")
    table[name] = value


def _place(error: ErrorDetails) -> str:
    """Return the dotted name of the key in a validation error. The key may be unknown to the schema."""
    location = error["loc"]
    return ".".join(map(str, location)) if error["type"] == UNKNOWN else key_at(RunConfig, location).place


def _sets(override: str, place: str, unknown: bool) -> bool:
    """Return whether an override sets the key at ``place``, or a key in the unknown section at ``place``."""
    key = override.partition("=")[0].strip()
    return key == place or (unknown and key.startswith(f"{place}."))


def _nearest(location: tuple[int | str, ...]) -> str:
    """Return a hint about an unknown key: fourfold's name if the key is another framework's, the sections that have a
    key of this name, a key with a similar spelling, or all keys of the section."""
    *sections, name = (str(part) for part in location if not isinstance(part, int))
    if (ours := next((ours for ours, theirs in NAMES_ELSEWHERE.items() if name in theirs), None)) is not None:
        return f"here it is called {ours}"
    models = {other: section_of(field.annotation) for other, field in RunConfig.model_fields.items()}
    others = [
        f"'{other}.{name}'" for other, model in models.items() if model is not None and name in model.model_fields
    ]
    if others:
        return f"did you mean {' or '.join(others)}?"
    section = _section(sections)
    close = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=CLOSE_SPELLING)
    if close:
        return f"did you mean '{'.'.join([*sections, close[0]])}'?"
    return f"choose from {', '.join(section.model_fields)}"


def _section(names: Sequence[str]) -> type[BaseModel]:
    model: type[BaseModel] = RunConfig
    for name in names:
        model = section_of(model.model_fields[name].annotation) or model
    return model
