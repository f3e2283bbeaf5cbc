"""The templates in examples/clusters: scripts and manifests that start a job, for users to copy and change."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer import main

from fourfold.cli.app import app
from fourfold.run_file.load import load_run

yaml = pytest.importorskip("yaml")

REPOSITORY = Path(__file__).parents[2]
CLUSTERS = REPOSITORY / "examples" / "clusters"
RUN_FILE = REPOSITORY / "examples" / "llama3-8b-8gpus.toml"
BIN = Path(sys.executable).parent
SHELLCHECK = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")


def started(folder: Path, command: list[str], **environment: str) -> list[str]:
    """Return the torchrun command that a node's command starts. A stand-in for torchrun prints it."""
    (folder / "torchrun").write_text('#!/bin/bash\nprintf "%q " torchrun "$@"\n')
    (folder / "torchrun").chmod(0o755)
    environment |= {"PATH": f"{folder}:{BIN}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return shlex.split(done.stdout)


def options_of(words: list[str]) -> dict[str, str]:
    return dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))


def processes_of(words: list[str]) -> int:
    """Check that fourfold and torchrun would accept their parts of a torchrun command. Return its number of
    processes.
    """
    from torch.distributed.run import parse_args

    at = words.index("fourfold")
    given = parse_args(words[1:])
    assert [given.training_script, *given.training_script_args] == words[at:]
    command = main.get_command(app).commands["train"]
    context = command.make_context("train", words[at + 2 :])
    run = load_run(RUN_FILE, context.params["overrides"])
    processes = int(given.nnodes) * int(given.nproc_per_node)
    assert run.parallel.world_size == processes
    return processes


def test_the_script_for_torchrun(tmp_path: Path) -> None:
    script = CLUSTERS / "torchrun.sh"
    words = ["bash", str(script), "node0", "2", "8", "train", str(RUN_FILE), "--set", "parallel.dp=2"]
    assert processes_of(started(tmp_path, words)) == 16
    assert options_of(started(tmp_path, words))["rdzv-endpoint"] == "node0:29500"
    if SHELLCHECK is not None:
        checked = subprocess.run([SHELLCHECK, script], text=True, capture_output=True)
        assert checked.stdout == "" and checked.returncode == 0


@pytest.mark.parametrize(
    ("file", "types"),
    [
        ("kubernetes.yaml", ["IoK8sApiCoreV1Service", "IoK8sApiBatchV1Job"]),
        ("kubeflow.yaml", ["TrainerV1alpha1TrainJob"]),
    ],
)
def test_a_manifest_conforms_to_its_types(file: str, types: list[str]) -> None:
    """Every required field is present, and every field belongs to its type."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    documents = list(yaml.safe_load_all((CLUSTERS / file).read_text()))
    assert [getattr(models, name).from_dict(each).to_dict() for name, each in zip(types, documents, strict=True)] == (
        documents
    )


def test_the_manifest_for_kubernetes(tmp_path: Path) -> None:
    service, job = yaml.safe_load_all((CLUSTERS / "kubernetes.yaml").read_text())
    name = job["metadata"]["name"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    for index in (1, 0):
        words = started(tmp_path, container["command"], JOB_COMPLETION_INDEX=str(index))
        assert options_of(words)["rdzv-conf"].endswith(f"is_host={1 - index}")
    assert options_of(words)["rdzv-endpoint"] == f"{name}-0.{pod['subdomain']}:29500"
    assert words[words.index("fourfold") :][:3] == ["fourfold", "train", "/etc/fourfold/run.toml"]
    assert processes_of(words) == spec["completions"] * container["resources"]["limits"]["nvidia.com/gpu"]
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


def test_the_manifest_for_kubeflow_trainer() -> None:
    job = yaml.safe_load((CLUSTERS / "kubeflow.yaml").read_text())
    trainer = job["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"]]
    run = load_run(RUN_FILE, words[words.index("--set") + 1 :: 2])
    assert run.parallel.world_size == trainer["numNodes"] * trainer["numProcPerNode"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_the_task_for_skypilot(tmp_path: Path) -> None:
    """Run as on a SkyPilot node, its script gives torchrun one process per GPU."""
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    place = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    words = started(tmp_path, ["bash", "-c", task["run"]], **place)
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    assert processes_of(words) == task["num_nodes"] * gpus
    assert options_of(words)["rdzv-endpoint"] == "10.0.0.1:29500"


def test_the_clusters_page_names_every_template() -> None:
    page = (REPOSITORY / "docs" / "clusters.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\(\.\./examples/clusters/([\w.]+)\)", page))
    assert named == {file.name for file in CLUSTERS.iterdir()}
