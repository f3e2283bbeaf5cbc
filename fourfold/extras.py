"""Imports libraries of the optional extras, and drops warnings of other libraries that mean nothing."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from types import ModuleType

from fourfold.errors import UserError

HARMLESS = {
    "torchao": "Failed to load ",
    "torch.utils._pytree": "%s is an Enum subclass and is now natively supported",
}
"""Warnings printed wherever transformers imports torchao: the logger, and how the message begins.

torchao reports kernels that were built for another GPU or Python, which it can do without; the warning of torch is
meant for the authors of torchao.
"""

RENAMED = r"`torch\.distributed\.\w+(\.\w+)?` is deprecated"
"""torch's warning about its own code, which calls collectives by names that torch has deprecated."""


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional extra.

    purpose: how the sentence of the ``UserError`` begins where it is not installed, such as "chat templates need".
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, extra, purpose) from error


def require_extra(module: str, extra: str, purpose: str) -> None:
    """Raise as ``import_extra`` does where a module is not installed, without the time that importing it takes."""
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra, purpose)


def drop_harmless_warnings() -> None:
    """Stop these warnings, and no others, from being printed."""
    warnings.filterwarnings("ignore", RENAMED, category=FutureWarning)
    for name in HARMLESS:
        logging.getLogger(name).addFilter(_is_worth_printing)


def _missing(module: str, extra: str, purpose: str) -> UserError:
    library = module.partition(".")[0].replace("_", "-")
    return UserError(f"{purpose} the {library} library: pip install 'fourfold[{extra}]'")


def _is_worth_printing(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(HARMLESS[record.name])
