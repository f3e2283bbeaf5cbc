"""Turn a mistake that typer finds in a command line into one sentence. typer would print a box of several lines."""

import difflib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from pydantic import ValidationError
from typer._click.core import Command, Context
from typer._click.exceptions import BadParameter, ClickException, MissingParameter, NoSuchOption, UsageError
from typer._click.shell_completion import CompletionItem
from typer.core import TyperGroup

from fourfold.errors import UserError

LARGEST = 2**64 - 1
"""Largest integer that an option such as --seed accepts."""


class FirstUnlessNamed(TyperGroup):
    """A group of commands that runs its first command unless the user names another command of the group."""

    own_options: tuple[str, ...] = ("--help",)
    """Options of the group itself. All other options belong to the first command."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in self.own_options:
            refuse_misspelled(args[0], list(self.commands), f" for `{ctx.info_name}`")
            args = [next(iter(self.commands)), *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Context, incomplete: str) -> list[CompletionItem]:
        """Offer the options of the first command in addition to the commands."""
        if incomplete.startswith("-"):
            return next(iter(self.commands.values())).shell_complete(ctx, incomplete)
        return super().shell_complete(ctx, incomplete)


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ``UserError`` if one of the command's arguments is a number that is too large, or is empty. Only the value
    of ``--prompt`` may be empty. Empty arguments often come from unset shell variables."""
    for before, argument in pairwise(("", *arguments)):
        given, equals, value = argument.partition("=")
        option, value = (given, value) if equals and given.startswith("--") else (before, argument)
        if not value and option != "--prompt":
            where = f"the value of {option}" if option.startswith("--") else "an argument"
            raise UserError(f"{where} is empty (''); give a value, or leave it out to use the default")
        if value.isdecimal() and int(value[:40]) > LARGEST:
            raise UserError(f"{option} {value[:40]}: must be at most {LARGEST:,}, such as 8".lstrip())


def usage_sentence(error: ClickException) -> str:
    """Return a sentence that says what is wrong with the command line, where, and what would work. Raise ``UserError``
    for an unknown command."""
    context = error.ctx if isinstance(error, UsageError) else None
    named = context
    if context is not None and context.parent is not None and isinstance(context.parent.command, FirstUnlessNamed):
        # Users usually leave out the name of a group's first command (``FirstUnlessNamed``). So show only the group's
        # name.
        named = context.parent if context.info_name == next(iter(context.parent.command.commands)) else context
    name = "" if named is None else named.command_path.removeprefix("fourfold").strip()
    where = f" for `{name}`" if name else ""
    more = f"`fourfold {name} --help`".replace("  ", " ")
    message = error.format_message().rstrip(".")
    if isinstance(error, NoSuchOption):
        known = sorted(o for p in context.command.params for o in p.opts) if context is not None else []
        close = difflib.get_close_matches(error.option_name, known, 1, 0.5)
        return f"no option {error.option_name}{where}; " + (
            f"did you mean {close[0]}?" if close else f"{more} lists all options"
        )
    if isinstance(error, MissingParameter) and error.param is not None:
        return f"{_given(error)} is missing{where}; {_example(context) or f'{more} describes it'}"
    if isinstance(error, BadParameter) and isinstance(error.__cause__, ValidationError):
        first = error.__cause__.errors()[0]
        problem = re.sub("^Input should be|^Value error, '.*' is not", "must be", first["msg"]).split(", unable")[0]
        problem = problem.replace("a valid integer", "a whole number, such as 8").replace(
            "a valid number", "a number, such as 0.5"
        )
        return f"{_given(error)} {first['input']}: {problem.rstrip('.')}"
    if (unknown := re.match("No such command '(.*?)'", message)) and context is not None:
        assert isinstance(context.command, TyperGroup)
        refuse_command(unknown[1], context.command.list_commands(context), where)
    return f"{message[0].lower()}{message[1:]}{where}; {more} shows what it takes"


def refuse_command(name: str, known: list[str], where: str) -> None:
    """Raise ``UserError`` for an unknown command. The message suggests the known command with the most similar name. If
    no name is similar, it lists all commands."""
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(known)}"
    raise UserError(f"no command '{name}'{where}; {hint}")


def refuse_misspelled(name: str, known: list[str], where: str) -> None:
    """Raise ``UserError`` if ``name`` is similar to a known command, and no file with this name exists."""
    if difflib.get_close_matches(name, known, 1, 0.7) and not name.startswith("-") and not Path(name).exists():
        refuse_command(name, known, where)


def _given(error: BadParameter) -> str:
    param = error.param
    assert param is not None
    is_option = any(name.startswith("-") for name in param.opts)
    return max(param.opts, key=len) if is_option else str(getattr(param, "metavar", None) or param.name)


def _example(context: Context | None) -> str:
    """Return the example in a command's help text as a phrase ("for example fourfold …"). Return an empty text if the
    help text has no example."""
    command: Command | None = None if context is None else context.command
    found = re.search(r"Example: (fourfold [^\n]*)", (command and command.help) or "")
    return f"for example {found[1]}" if found else ""
