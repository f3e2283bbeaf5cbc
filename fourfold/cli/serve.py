"""fourfold serve"""

from __future__ import annotations

from typing import Annotated, Literal

import typer


def serve(
    model: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|RUN|HF", help="The model: a checkpoint, a run's folder, or a folder.")
    ],
    options: Annotated[
        list[str],
        typer.Argument(metavar="[-- OPTIONS]", help="Options of the server itself, behind --."),
    ] = [],  # noqa: B006 (typer reads it, nobody writes it)
    engine: Annotated[
        Literal["vllm", "transformers"] | None,
        typer.Option(help="Whose server. Default: vLLM where it is installed, else that of transformers."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name in requests. Default: the last part of its path.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "localhost",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
) -> None:
    """Serve a model with an OpenAI-compatible API, by the server of vLLM or of transformers.

    A checkpoint is exported for it into a temporary folder, LoRA's adapters merged. Ctrl-C ends it.

    Example: fourfold serve runs/notes --port 8000 -- --continuous-batching
    """
    from fourfold.inference import server

    raise typer.Exit(server.serve(model, engine, host, port, name, options))
