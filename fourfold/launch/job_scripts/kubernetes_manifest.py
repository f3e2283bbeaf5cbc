"""Writes the manifest that trains a run file on Kubernetes, without an operator: ``kubernetes.yaml``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.launch.job_scripts.slurm_script import tasks_per_node
from fourfold.launch.job_scripts.slurm_site import Site, one_line
from fourfold.launch.job_scripts.template import fill, train_words
from fourfold.launch.job_scripts.torchrun_script import PORT, torchrun_options

RUN_FILE = "/etc/fourfold/run.toml"

LONGEST_NAME = 52
"""Characters of a Job's name: the names of its pods, with an index, are labels of DNS (63)."""

MEETING = "join_timeout=1800,read_timeout=600"
"""Seconds that a node waits for the others, and for the first: images may still be pulled."""

START = f"""[ "$JOB_COMPLETION_INDEX" = 0 ] && first=1 || first=0
exec torchrun "--rdzv-conf={MEETING},is_host=$first" "$@"
"""
"""A pod is the first by its index: its own name in DNS may not be known yet when it starts."""

LAST_SECONDS = 30
"""Seconds between the end of torchrun's processes and that of the pod."""


@dataclass(frozen=True)
class KubernetesJob:
    """Options of a job, beside its run file."""

    nodes: int
    image: str
    claim: str
    """The persistent volume claim of data and checkpoints; every pod mounts it."""
    folder: str = "/workspace"
    """Where it is mounted: relative paths of the run file begin here."""
    gpu: str = "nvidia.com/gpu"
    """The resource by which the cluster counts GPUs."""
    save_seconds: int = 300
    max_crashes: int = 3
    overrides: Sequence[str] = ()


def kubernetes_manifest(run_text: str, run: RunConfig, job: KubernetesJob) -> str:
    """The text of the manifest; raises ``UserError`` where the nodes do not divide the grid.

    run_text: the run file, which the manifest carries in a ConfigMap.
    """
    name = resource_name(run.name)
    if not job.folder.startswith("/"):
        raise UserError(f"--folder {job.folder} is a path inside the container, which begins with /")
    processes = tasks_per_node(run, Site("kubernetes"), job.nodes)
    options = torchrun_options(run, job.nodes, job.max_crashes)
    options += [f"--rdzv-id={name}", "--rdzv-backend=c10d", f"--rdzv-endpoint={name}-0.{name}:{PORT}", "--no-python"]
    on_gpus = run.training.device != "cpu"
    quoted = {key: json.dumps(one_line(text, f"--{key.lower()}")) for key, text in
              {"IMAGE": job.image, "CLAIM": job.claim, "FOLDER": job.folder, "GPU": job.gpu}.items()}  # fmt: skip
    resources = f"          resources:\n            limits:\n              {quoted.pop('GPU')}: {processes}"
    parts = quoted | {
        "NAME": name,
        # YAML reads JSON, so that no word of the command needs other rules of quoting.
        "COMMAND": json.dumps(["/bin/sh", "-c", START, "torchrun", *options, *train_words(RUN_FILE, job.overrides)]),
        "RUN_FILE": "".join(f"    {line}\n" if line else "\n" for line in run_text.splitlines()).rstrip("\n"),
        "NODES": str(job.nodes),
        "BACKOFF_LIMIT": str(job.nodes * job.max_crashes),
        "SAVE_SECONDS": str(job.save_seconds),
        "GRACE_SECONDS": str(job.save_seconds + LAST_SECONDS),
        "RESOURCES": resources if on_gpus else "          resources: {}",
    }
    return fill("kubernetes.yaml", parts)


def resource_name(name: str) -> str:
    """A run's name as Kubernetes has names: lower-case letters, digits and hyphens, with a letter first."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"run-{plain}")[:LONGEST_NAME].strip("-")
