"""Load the conventions of a SLURM cluster (a site): its nodes, options of sbatch and srun, and environment variables.

Each site is a TOML file in `fourfold/launch/job_scripts/sites`. Comments in the file name the sources of the values.
"""

import difflib
import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from fourfold.config.expected_values import mistake
from fourfold.config.strict import Strict
from fourfold.errors import UserError
from fourfold.parsing import parse_toml
from fourfold.untrusted_files import read_text_file

FOLDER: Traversable = files("fourfold.launch.job_scripts").joinpath("sites")


def one_line(text: str, what: str = "it") -> str:
    """Return the text if it has no line breaks or other control characters. Otherwise raise `UserError`.

    Args:
        text: The text to check.
        what: What to call the text in the error message.
    """
    if re.search(r"[\x00-\x1f\x7f]", text):
        raise UserError(f"{what} must be text of one line, not {text!r}")
    return text


def _option_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w-]*", name):
        raise ValueError("it is not the name of an option or variable; write it without leading dashes")
    return name


def _option_value(value: Any) -> Any:
    """Convert an option's value in TOML to text. ``true`` means an option without a value."""
    return "" if value is True else str(value) if type(value) is int else value


Line = Annotated[str, AfterValidator(one_line)]
Options = dict[Annotated[str, AfterValidator(_option_name)], Annotated[Line, BeforeValidator(_option_value)]]
"""Maps the long names of options, without dashes, to their values. An option without a value maps to ""."""


class Site(Strict):
    """The conventions of one site.

    The script puts values of environment variables between double quotes, so they can contain `$USER`.
    """

    name: Line
    gpus_per_node: int | None = Field(None, ge=1)
    """Number of GPUs per node. None requests as many GPUs as the grid needs."""
    cpus_per_task: int | None = Field(None, ge=1)
    """Number of CPUs per process. The script passes this number to both sbatch and srun. Since SLURM 22.05, srun does
    not inherit it from sbatch."""
    sbatch: Options = Field(default_factory=dict)
    srun: Options = Field(default_factory=dict)
    commands: list[Line] = Field([])
    """Lines that the script runs after the user's setup."""
    environment: Options = Field(default_factory=dict)
    """Environment variables that the script sets, unless the user's setup has set them."""
    environment_of_several_nodes: Options = Field(default_factory=dict)
    """Further environment variables, for jobs on two or more nodes."""
    machine: Line | None = None
    """The planner's machine that describes the site's nodes. None if the planner has no such machine."""


def site_names() -> list[str]:
    """Return the names of the sites that come with fourfold, sorted."""
    return sorted(file.name.removesuffix(".toml") for file in FOLDER.iterdir() if file.name.endswith(".toml"))


def load_site(name: str, given_as: str = "--site") -> Site:
    """Load a site.

    Args:
        name: The name of a built-in site, or the path of a TOML file.
        given_as: The option that named the site. Error messages begin with it.

    Raises:
        UserError: The site is unknown or invalid.
    """
    if name.endswith(".toml"):
        text = read_text_file(Path(name), given_as, "give a site's file, or a built-in site such as generic")
        return parse_site(text, where=name)
    if name not in site_names():
        near = difflib.get_close_matches(name.lower(), site_names(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(site_names())}."
        raise UserError(f"{given_as} {name} is unknown; {hint} To use your own file, give a path that ends in .toml.")
    return parse_site(FOLDER.joinpath(f"{name}.toml").read_text(encoding="utf-8"), where=f"{name}.toml")


def parse_site(text: str, where: str) -> Site:
    """Parse the text of a site's file.

    Args:
        text: The content of the site's file, in TOML.
        where: Name of the file, for error messages.

    Raises:
        UserError: The text is not a valid site.
    """
    try:
        return Site.model_validate({"name": Path(where).stem} | parse_toml(text))
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "extra_forbidden":
            known = ", ".join(Site.model_fields)
            raise UserError(f"{where}: unknown key '{first['loc'][0]}'; choose from {known}") from None
        raise UserError(f"{where}: {mistake(first, Site)}") from None
    except ValueError as error:
        raise UserError(f"{where} is not valid TOML: {error}") from None
