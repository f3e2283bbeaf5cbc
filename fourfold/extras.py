"""Import optional libraries. If one is missing, an error names the extra to install. Also suppress harmless warnings of
other libraries."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from types import ModuleType

from fourfold.errors import UserError

HARMLESS = {"torchao": "Failed to load ", "torch.utils._pytree": "%s is an Enum subclass and is now natively supported"}
"""Warnings that appear when transformers imports torchao. Each entry maps a logger's name to the beginning of its
message.

torchao warns that it cannot load kernels that were built for another GPU or Python, but it works without them. torch's
warning is for the authors of torchao.
"""

RENAMED = r"`torch\.distributed\.\w+(\.\w+)?` is deprecated"
"""Pattern of warnings about deprecated names of collectives. torch's own code causes these warnings, so users cannot
avoid them."""


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import a module that an optional extra installs, and return it.

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
    """Check that a module is installed, without importing it, because the import may take long. The arguments are the
    same as for `import_extra`.

    Raises:
        UserError: The module is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise _missing(module, extra, purpose)


def drop_harmless_warnings() -> None:
    """Suppress the harmless warnings that ``HARMLESS`` and ``RENAMED`` describe."""
    warnings.filterwarnings("ignore", RENAMED, category=FutureWarning)
    for name in HARMLESS:
        logging.getLogger(name).addFilter(_is_worth_printing)


def _missing(module: str, extra: str, purpose: str) -> UserError:
    library = module.partition(".")[0].replace("_", "-")
    return UserError(f"{purpose} the {library} library: pip install 'fourfold[{extra}]'")


def _is_worth_printing(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(HARMLESS[record.name])
