"""Starts the OpenAI-compatible server of another library on a model of ours: transformers or vLLM."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType

from fourfold.data.files import temporary_folder
from fourfold.errors import UserError
from fourfold.huggingface.export_model import as_huggingface
from fourfold.processes import end_with_starter

ENGINES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "vllm": (("vllm",), ("-m", "vllm.entrypoints.cli.main", "serve"), "pip install vllm"),
    "transformers": (
        ("transformers", "fastapi", "uvicorn", "openai", "accelerate"),
        ("-m", "transformers.cli.transformers", "serve"),
        "pip install 'fourfold[serve]'",
    ),
}
"""The modules that a server needs, the words of Python that start it, and what installs it; the first is preferred."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")


def serve(
    model: str, engine: str | None, host: str, port: int, name: str | None = None, options: Sequence[str] = ()
) -> int:
    """Serve a model until the server ends, and return its exit code.

    name: of the model in requests; by default the last part of its path. The server's working directory is a temporary
    one; paths among its ``options`` are made absolute (``with_absolute_path``). A checkpoint or run of ours is exported
    first, into a temporary folder. SIGINT, SIGTERM and SIGHUP end the server in order, or what comes before its start;
    on Linux SIGKILL of this process ends it too. Raises ``UserError`` where the engine is not installed, the model has
    no tokenizer that it can use, or no such name.
    """
    start = engine_words(engine)
    name = _checked_name(name, model)
    options = [with_absolute_path(word) for word in options]
    with (
        _passed_on() as server,
        as_huggingface(model) as (folder, tokenizer),
        temporary_folder() as place,
    ):
        if tokenizer in (None, "bytes"):
            raise UserError(
                f"{model} has no tokenizer that a server can use; train with one, or export the model with --tokenizer"
            )
        # Servers call a model by the path that they are given, so they get one that is only the name.
        link = place / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(folder).absolute())
        code = server.run([sys.executable, *start, name, "--host", host, "--port", str(port), *options], str(place))
        return 128 - code if code < 0 else code


def _checked_name(name: str | None, model: str) -> str:
    found = os.path.basename(os.path.abspath(model)) if name is None else name
    if _NAME.fullmatch(found):
        return found
    which = f"--name {found}" if name is not None else f"{found}, the name of the model's folder,"
    raise UserError(
        f"{which} must be letters, digits, '.', '_' and '-', in parts joined by '/', none of which begins with '.' or "
        "'-'; for example --name org/model"
    )


def with_absolute_path(word: str) -> str:
    """Make a path that a word is, or has behind a ``=``, absolute.

    A path is a file that exists here, with a ``/`` or ``.`` in its name, or a folder that is written with a ``.`` at
    its beginning, as ``./adapter``: ``org/model`` and ``cpu`` are names also where there are folders of that name.
    """
    is_file = os.path.isfile(word) and ("/" in word or "." in word)
    if is_file or (os.path.isdir(word) and word.startswith(".")):
        return os.path.abspath(word)
    before, equals, rest = word.partition("=")
    return f"{before}={with_absolute_path(rest)}" if equals else word


def engine_words(engine: str | None) -> tuple[str, ...]:
    """The words of Python that start an engine, or with None the first that is installed."""
    for name in ENGINES if engine is None else [engine]:
        modules, words, _ = ENGINES[name]
        if all(importlib.util.find_spec(module) for module in modules):
            return words
    if engine is not None:
        modules, _, install = ENGINES[engine]
        missing = next(module for module in modules if importlib.util.find_spec(module) is None)
        raise UserError(f"--engine {engine} needs the library {missing}: {install}")
    raise UserError(f"serving needs vLLM ({ENGINES['vllm'][2]}) or transformers' server: {ENGINES['transformers'][2]}")


class _Server:
    """A server's process, and the signals that are for it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._is_starting = False
        self._waiting: list[int] = []

    def run(self, words: Sequence[str], folder: str) -> int:
        """Start a server in a folder, wait for its end, and return its exit code, or the negative of a signal."""
        self._is_starting = True
        # In a session of its own a Ctrl-C of the terminal reaches it once, through us. Where we are killed it gets
        # SIGTERM, so that it ends its own processes, which would go on holding the GPUs.
        self.process = subprocess.Popen(
            words, cwd=folder, start_new_session=True, preexec_fn=partial(end_with_starter, signal.SIGTERM)
        )
        for number in self._waiting:  # that came while it was started
            self.process.send_signal(number)
        return self.process.wait()

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self.process is not None:
            self.process.send_signal(number)
        elif self._is_starting:
            self._waiting.append(number)
        else:
            raise SystemExit(128 + number)


@contextmanager
def _passed_on() -> Iterator[_Server]:
    """Pass signals on to the server that the block runs, which closes its connections.

    A signal that is ignored, as SIGHUP is under nohup, stays so; the server inherits that.
    """
    server = _Server()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, server.take) for number in heeded}
    try:
        yield server
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
