"""Import libraries of the optional extras, and suppress harmless warnings of other libraries."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from types import ModuleType

from fourfold.errors import UserError

HARMLESS = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}
"""Warnings that appear when transformers imports torchao: the name of the logger, and the beginning of the message.

torchao warns about kernels that were built for another GPU or Python, but it works without them. torch's warning is
meant for the authors of torchao.
"""

RENAMED = r"`torch\.distributed\.\w+(\.\w+)?` is deprecated"
"""A warning about deprecated names of collectives. torch's own code causes it, so users cannot avoid it."""


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module of an optional extra.

    Args:
        module: Name of the module.
        extra: Name of the extra that installs it.
        purpose: Beginning of the error message, such as "chat templates need".

    Raises:
        UserError: The module is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(module, extra, purpose) from error


def require_extra(module: str, extra: str, purpose: str) -> None:
    """Check that a module is installed, without taking the time to import it. The arguments are the same as for
    `import_extra`.

    Raises:
        UserError: The module is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra, purpose)


def drop_harmless_warnings() -> None:
    """Suppress exactly the warnings listed in this module."""
    warnings.filterwarnings("ignore", RENAMED, category=FutureWarning)
    for name in HARMLESS:
        logging.getLogger(name).addFilter(_is_worth_printing)


def _missing(module: str, extra: str, purpose: str) -> UserError:
    library = module.partition(".")[0].replace("_", "-")
    return UserError(f"{purpose} the {library} library: pip install 'fourfold[{extra}]'")


def _is_worth_printing(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(HARMLESS[record.name])
