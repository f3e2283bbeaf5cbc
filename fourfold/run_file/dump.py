"""Write a run's settings as the TOML text of a run file."""

import json
from typing import Any

from fourfold.config.run import RunConfig


def to_toml(run: RunConfig) -> str:
    """Return the text of a run file. If you load this file, you get a run with the same settings."""
    return table_to_toml(run.model_dump(mode="json", exclude_none=True))


def table_to_toml(table: dict[str, Any]) -> str:
    """Return the text of a run file with the keys and sections in ``table``."""
    sections = {name: value for name, value in table.items() if isinstance(value, dict)}
    lines = [f"{name} = {_value(value)}" for name, value in table.items() if name not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    # TOML writes strings, booleans, and numbers like JSON, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
