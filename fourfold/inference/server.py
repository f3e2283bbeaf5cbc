"""Starts the OpenAI-compatible server of another library on a model of ours: transformers or vLLM."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fourfold.errors import UserError
from fourfold.huggingface.export_model import as_huggingface

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
    one, so that paths among its ``options`` are absolute. A checkpoint or run of ours is exported first, into a
    temporary folder. SIGINT and SIGTERM end the server in order. Raises ``UserError`` where the engine is not
    installed, or the model has no tokenizer that it can use.
    """
    start = engine_words(engine)
    if name is None:
        name = Path(model).absolute().name
    elif not _NAME.fullmatch(name):
        raise UserError(
            f"--name {name} must be letters, digits, '.', '_' and '-', in parts joined by '/', none of which begins "
            "with '.' or '-'; for example org/model"
        )
    with as_huggingface(model) as (folder, tokenizer), tempfile.TemporaryDirectory(prefix="fourfold-") as place:
        if tokenizer in (None, "bytes"):
            raise UserError(
                f"{model} has no tokenizer that a server can use; train with one, or export the model with --tokenizer"
            )
        # Servers call a model by the path that they are given, so they get one that is only the name.
        link = Path(place, name)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(folder).absolute())
        words = [sys.executable, *start, name, "--host", host, "--port", str(port), *options]
        # In a session of its own a Ctrl-C of the terminal reaches it once, through us.
        with _passed_on() as started:
            started.append(subprocess.Popen(words, cwd=place, start_new_session=True))
            code = started[0].wait()
        return 128 - code if code < 0 else code


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


@contextmanager
def _passed_on() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Pass SIGINT and SIGTERM on to the server that the block puts into the list, which closes its connections."""
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if not started:
            raise KeyboardInterrupt
        started[0].send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield started
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
