"""Load the conventions of a SLURM site: nodes, options of sbatch and srun, and environment variables.

Sites are TOML files in `fourfold/launch/job_scripts/sites`. Their comments name the sources of the values.
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
from fourfold.untrusted_files import read_text_file

FOLDER: Traversable = files("fourfold.launch.job_scripts").joinpath("sites")

Options = dict[str, str]
"""Maps the long names of options, without dashes, to their values. An option without a value maps to ""."""


@dataclass(frozen=True)
class Site:
    """The conventions of one site. Environment values are shell text between double quotes, so `$USER` works."""

    name: str
    gpus_per_node: int | None = None
    """Number of GPUs per node. None means as many as the grid needs."""
    cpus_per_task: int | None = None
    """Value that is passed to both sbatch and srun, because since SLURM 22.05 a step does not inherit it from the
    job."""
    sbatch: Options = field(default_factory=dict)
    srun: Options = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    """Lines that the script runs after the user's setup."""
    environment: Options = field(default_factory=dict)
    """Environment variables that the script sets, unless the user's setup has set them."""
    environment_of_several_nodes: Options = field(default_factory=dict)
    """Further environment variables, for jobs on two or more nodes."""


COUNTS, TABLES = ("gpus_per_node", "cpus_per_task"), ("sbatch", "srun", "environment", "environment_of_several_nodes")


def site_names() -> list[str]:
    """Return the names of the sites that come with fourfold, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def load_site(name: str, given_as: str = "--site") -> Site:
    """Load a site by its built-in name or from a TOML file. Messages begin with ``given_as``, the option that named the
    site.

    Raises:
        UserError: The site is unknown or invalid.
    """
    if name.endswith(".toml"):
        text = read_text_file(Path(name), given_as, "give a site's file, or a built-in site such as generic")
        return parse_site(text, where=name)
    if name not in site_names():
        near = difflib.get_close_matches(name.lower(), site_names(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(site_names())}."
        raise UserError(f"{given_as} {name} is unknown; {hint} To use your own file, give a path that ends in .toml.")
    return parse_site(FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"), where=f"{name}.toml")


def parse_site(text: str, where: str) -> Site:
    """Parse the text of a site's file.

    Args:
        text: The text.
        where: Name of the file, for messages.

    Raises:
        UserError: The text is not a valid site.
    """
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
    """Return the text, after checking that it can be part of one line of the script.

    Raises:
        UserError: `text` is not a string of one line.
    """
    if not isinstance(text, str) or re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"{what} = {text!r} must be text of one line")
    return text


def _option(name: str, value: Any, section: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise UserError(f"{section}.{name} is not the name of an option or variable; write it without leading dashes")
    if value is True:
        return ""
    return one_line(str(value) if type(value) is int else value, f"{section}.{name}")
