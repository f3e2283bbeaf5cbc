"""Writes the shell script that trains a run file with torchrun, started on every node: ``torchrun.sh``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from fourfold.config.run import RunConfig
from fourfold.launch.job_scripts.slurm_script import tasks_per_node
from fourfold.launch.job_scripts.slurm_site import Site
from fourfold.launch.job_scripts.template import fill, source_line, train_words

PORT = 29_500


def torchrun_script(
    run_file: str,
    run: RunConfig,
    nodes: int,
    setup: str | None = None,
    save_seconds: int = 300,
    max_crashes: int = 3,
    overrides: Sequence[str] = (),
) -> str:
    """The text of the script; raises ``UserError`` where the nodes do not divide the grid.

    On several nodes its argument is the host of the first, where the others meet.
    """
    options = torchrun_options(run, nodes, max_crashes)
    if nodes > 1:
        options += [f"--rdzv-id={run.name}", "--rdzv-backend=c10d"]
    words = shlex.join(options) + (
        f' --rdzv-endpoint="${{1:?host of the first node}}:{PORT}"' if nodes > 1 else " --standalone"
    )
    source = [] if setup is None else ["# Your modules and environment", "# shellcheck source=/dev/null"]
    parts = {
        "USE": f"Start it on each of the {nodes} nodes: bash FILE HOST-OF-THE-FIRST" if nodes > 1 else "bash FILE",
        "SETUP": "\n".join(source + ([] if setup is None else [source_line(setup)])),
        "SAVE_SECONDS": str(save_seconds),
        "OPTIONS": words,
        "COMMAND": shlex.join(train_words(run_file, overrides)),
    }
    return fill("torchrun.sh", parts)


def torchrun_options(run: RunConfig, nodes: int, max_crashes: int) -> list[str]:
    """The options of torchrun on every node, without those of the rendezvous."""
    processes = tasks_per_node(run, Site("torchrun"), nodes)
    return [f"--nnodes={nodes}", f"--nproc-per-node={processes}", f"--max-restarts={max_crashes}"]
