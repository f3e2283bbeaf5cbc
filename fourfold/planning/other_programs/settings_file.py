"""Read the settings of another training program from a script, or from a YAML, TOML, or JSON file. No code in the file
is run."""

from itertools import islice
from pathlib import Path
from typing import Any

from fourfold.errors import UserError
from fourfold.extras import import_extra
from fourfold.parsing import dotted_keys, parse_json, parse_toml
from fourfold.planning.other_programs.shell_script import read_options
from fourfold.untrusted_files import read_text_file


def parse_yaml(text: str) -> Any:
    """Parse YAML without running code. Raise ``ValueError`` if the text is not YAML."""
    yaml = import_extra("yaml", "huggingface", "YAML needs")
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None


PARSERS = {".toml": parse_toml, ".json": parse_json, ".yaml": parse_yaml, ".yml": parse_yaml}
"""Parsers by the suffix of a file. Files with other suffixes are scripts."""
MOST = 10_000
"""Largest number of settings in a file. Without this limit, a small YAML file with aliases could expand to any number
of settings."""
FILES = "give a shell script or a list of options, or a .yaml, .toml, or .json file"


def read_settings(path: Path) -> tuple[dict[str, str], list[str]]:
    """Return the settings in a file.

    A script or a YAML file can name a configuration of DeepSpeed (.json). The returned settings include the settings of
    this configuration. This function looks for the configuration at the named path, relative to the folder of ``path``,
    and then directly in this folder. It opens no file outside this folder.

    Returns:
        The settings' values by name, and the conditions in a script that were not checked. The names of sections are
        joined with dots, and dashes become underscores. Settings without a value are left out, and so are the values
        "auto" and -1, which stand for a default.

    Raises:
        UserError: A file cannot be read, is damaged, or has no settings or more than ``MOST``.
    """
    text = read_text_file(path, "--from", FILES)
    try:
        parser = PARSERS.get(path.suffix.lower())
        table, conditions = read_options(text) if parser is None else (parser(text), [])
        pairs = dict(islice(dotted_keys(table), MOST + 1))
        settings = {key.replace(".--", ".").replace("-", "_"): setting_text(value) for key, value in pairs.items()}
    # A YAML table can contain itself, and the parsed value need not be a table.
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = f" ({' '.join(str(error).split())})" if isinstance(error, ValueError) else ""
        raise UserError(f"--from {path} is not a table of settings{reason}; {FILES}") from None
    if not 0 < len(pairs) <= MOST:
        raise UserError(f"--from {path} has no settings such as --num-layers, or more than {MOST:,}; {FILES}")
    named = Path(settings.get("deepspeed", ""))
    if named.suffix == ".json" and path.suffix != ".json":
        folder = path.parent.resolve()
        files = [
            file for file in (folder / named, folder / named.name) if file.exists() and folder in file.resolve().parents
        ]
        if not files:
            raise UserError(f"--from {path} needs {named}, which does not exist; put it into {path.parent}")
        settings |= read_settings(files[0])[0]
    return {name: value for name, value in settings.items() if value not in ("", "auto", "-1")}, conditions


def setting_text(value: Any) -> str:
    """Return a value as text. A boolean is "true" or "false", and the items of a list are separated by spaces."""
    if isinstance(value, list):
        return " ".join(map(setting_text, value))
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
