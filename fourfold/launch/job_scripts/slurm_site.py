"""The conventions of a SLURM site: nodes, options of sbatch and srun, environment.

Sites are TOML files (``fourfold/launch/job_scripts/sites``), in which every value names its source.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from dataclasses import dataclass, field, fields
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fourfold.errors import UserError

FOLDER: Traversable = files("fourfold.launch.job_scripts").joinpath("sites")

Options = dict[str, str]
"""Values by long name, without the dashes; an option without a value has an empty one."""


@dataclass(frozen=True)
class Site:
    """One site. The environment's values are shell text between double quotes, so that ``$USER`` works."""

    name: str
    gpus_per_node: int | None = None
    """None: as many as the grid needs."""
    cpus_per_task: int | None = None
    """Given to sbatch and srun: since SLURM 22.05 a step does not inherit it from the job."""
    sbatch: Options = field(default_factory=dict)
    srun: Options = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    """Lines of the script, behind the user's setup."""
    environment: Options = field(default_factory=dict)
    """Variables that are set unless the user's setup has set them."""
    environment_of_several_nodes: Options = field(default_factory=dict)
    """More of them, in jobs of two or more nodes."""


COUNTS, TABLES = ("gpus_per_node", "cpus_per_task"), ("sbatch", "srun", "environment", "environment_of_several_nodes")


def site_names() -> list[str]:
    """Names of the sites that come with fourfold, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def load_site(name: str) -> Site:
    """The site of a built-in name or of a TOML file; raises ``UserError`` for what is unknown or wrong in it."""
    if name.endswith(".toml"):
        try:
            return parse_site(Path(name).read_text(encoding="utf-8"), where=name)
        except OSError as error:
            raise UserError(f"--site {name} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"--site {name} is not text in UTF-8: {error}") from None
    if name not in site_names():
        near = difflib.get_close_matches(name.lower(), site_names(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(site_names())}."
        raise UserError(f"--site '{name}' is unknown; {hint} A file of your own ends in .toml.")
    return parse_site(FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"), where=f"{name}.toml")


def parse_site(text: str, where: str) -> Site:
    """A site from the text of its file."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML: {error}") from None
    known = [each.name for each in fields(Site)]
    unknown = [key for key in table if key not in known]
    if unknown:
        raise UserError(f"{where}: unknown key '{unknown[0]}'; there are {', '.join(known)}")
    values: dict[str, Any] = {"name": one_line(table.get("name", Path(where).stem), f"{where}: name")}
    for key in COUNTS:
        if key in table:
            if type(table[key]) is not int or table[key] < 1:
                raise UserError(f"{where}: {key} = {table[key]!r} must be a whole number of 1 or more")
            values[key] = table[key]
    for key in TABLES:
        if not isinstance(table.get(key, {}), dict):
            raise UserError(f"{where}: {key} must be a section, [{key}]")
        values[key] = {name: _option(name, value, f"{where}: {key}") for name, value in table.get(key, {}).items()}
    commands = table.get("commands", [])
    if not isinstance(commands, list):
        raise UserError(f"{where}: commands = {commands!r} must be a list of lines")
    values["commands"] = tuple(one_line(command, f"{where}: commands") for command in commands)
    return Site(**values)


def one_line(text: Any, what: str) -> str:
    """Return text that becomes a part of one line of the script; raises ``UserError`` for anything else."""
    if not isinstance(text, str) or re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"{what} = {text!r} must be text of one line")
    return text


def _option(name: str, value: Any, section: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise UserError(f"{section}.{name} is not the name of an option or variable; write it without dashes before it")
    if value is True:
        return ""
    return one_line(str(value) if type(value) is int else value, f"{section}.{name}")
