"""Scripts of `fourfold launch` for torchrun and Kubernetes, and the examples for Kubeflow Trainer and SkyPilot."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Cli
from patience import PATIENCE
from tiny_corpus import run_file
from typer import main

from fourfold.cli.app import app
from fourfold.launch.job_scripts.kubernetes_manifest import resource_name
from fourfold.run_file.load import load_run

yaml = pytest.importorskip("yaml")

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SHELLCHECK = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
IN_CLUSTER = ("--image", "registry/fourfold", "--claim", "training")


def options_of(words: list[str]) -> dict[str, str]:
    return dict(word[2:].partition("=")[::2] for word in words if word.startswith("--"))


def processes_of(words: list[str]) -> int:
    """Processes of torchrun's command, after checking that fourfold and torchrun would accept their parts of it."""
    from torch.distributed.run import parse_args

    at = words.index("fourfold")
    given = parse_args(words[1:])
    assert [given.training_script, *given.training_script_args] == words[at:]
    command = main.get_command(app).commands["train"]
    context = command.make_context("train", words[at + 2 :])
    assert context.params["run_file"]
    return int(given.nnodes) * int(given.nproc_per_node)


def conforms(document: dict[str, object], model: str) -> bool:
    """Whether a document is one of this type: nothing missing, nothing that the type does not have."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    return getattr(models, model).from_dict(document).to_dict() == document


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_script_for_torchrun(cli: Cli, tmp_path: Path, nodes: int) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", parallel__z=2, parallel__x=2)
    job = tmp_path / "job.sh"
    arguments = ("--nodes", nodes, "--setup", "my setup.sh", "--save-seconds", 60, "--set", "name=a-b")
    assert cli("launch", "torchrun", path, *arguments, "--output", job)[0] == 0
    (tmp_path / "my setup.sh").write_text("export FROM_SETUP=1$NOT_SET\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(
        '#!/bin/bash\nprintf "%q " torchrun "$@"\necho\necho $FROM_SETUP $TORCH_ELASTIC_SHUTDOWN_TIMEOUT\n'
    )
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", job, *["node0"] * (nodes > 1)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    called, variables = done.stdout.splitlines()
    words = shlex.split(called)
    assert variables == "1 60"
    assert processes_of(words) == 4
    assert words[-4:] == ["train", str(path), "--set", "name=a-b"]
    options = options_of(words)
    assert options["nproc-per-node"] == str(4 // nodes)
    assert options.get("rdzv-endpoint") == (None if nodes == 1 else "node0:29500")
    assert ("standalone" in options) == (nodes == 1)
    if nodes > 1:
        assert subprocess.run(["bash", job], cwd=tmp_path, env=environment, capture_output=True).returncode == 1
    if SHELLCHECK is not None:
        checked = subprocess.run([SHELLCHECK, job], text=True, capture_output=True)
        assert checked.stdout == "" and checked.returncode == 0


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_manifest_for_kubernetes(cli: Cli, tmp_path: Path, device: str) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", parallel__z=2, parallel__x=2, training__device=device)
    text = path.read_text() + "\n\n# the end\n\n"
    path.write_text(text)
    arguments = ("--nodes", 2, "--gpu", "amd.com/gpu", "--max-crashes", 2, "--set", "model.hidden_size=64")
    code, manifest, errors = cli("launch", "kubernetes", path, *IN_CLUSTER, *arguments)
    assert code == 0, errors
    run_file_in, service, job = yaml.safe_load_all(manifest)
    assert run_file_in["data"]["run.toml"].rstrip("\n") == text.rstrip("\n")
    assert conforms(run_file_in, "IoK8sApiCoreV1ConfigMap")
    assert conforms(job, "IoK8sApiBatchV1Job")

    name = job["metadata"]["name"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert conforms(service, "IoK8sApiCoreV1Service") and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert service["metadata"]["name"] == pod["subdomain"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["backoffLimit"] == 4 and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" torchrun "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    for index in (1, 0):
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index)}
        words = subprocess.check_output(container["command"], env=environment, text=True).splitlines()
        assert options_of(words)["rdzv-conf"].endswith(f"is_host={1 - index}")
    assert processes_of(words) == 4
    assert words[-5:] == ["fourfold", "train", "/etc/fourfold/run.toml", "--set", "model.hidden_size=64"]
    assert options_of(words)["rdzv-endpoint"] == f"{name}-0.{pod['subdomain']}:29500"
    assert container["resources"] == ({} if device == "cpu" else {"limits": {"amd.com/gpu": 2}})
    variables = {variable["name"]: variable["value"] for variable in container["env"]}
    assert int(variables["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("name", "found"),
    [("run", "run"), ("Llama_3.8B", "llama-3-8b"), ("7b", "run-7b"), ("_", "run"), ("a" * 51 + "_bc", "a" * 51)],
)
def test_names_of_kubernetes(name: str, found: str) -> None:
    assert resource_name(name) == found


@pytest.mark.parametrize(
    ("launcher", "arguments", "message"),
    [
        ("torchrun", ("--nodes", 3), "needs 4 GPUs, and --nodes 3 does not divide them"),
        ("kubernetes", (*IN_CLUSTER, "--nodes", 3), "needs 4 GPUs, and --nodes 3 does not divide them"),
        ("kubernetes", (*IN_CLUSTER, "--folder", "data"), "--folder data is a path inside the container"),
        ("kubernetes", ("--image", "a\nb", "--claim", "c"), "--image = 'a\\nb' must be text of one line"),
    ],
)
def test_what_is_refused(cli: Cli, tmp_path: Path, launcher: str, arguments: tuple[object, ...], message: str) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", parallel__z=2, parallel__x=2)
    code, output, errors = cli("launch", launcher, path, *arguments)
    assert (code, output) == (2, "")
    assert message in errors and errors.count("\n") == 1


def test_the_example_for_kubeflow_trainer() -> None:
    job = yaml.safe_load((REPOSITORY / "examples" / "clusters" / "kubeflow.yaml").read_text())
    assert conforms(job, "TrainerV1alpha1TrainJob")
    trainer = job["spec"]["trainer"]
    words = [*trainer["command"], *trainer["args"]]
    run = load_run(REPOSITORY / "examples" / "llama3-8b-8gpus.toml", words[words.index("--set") + 1 :: 2])
    assert run.parallel.world_size == trainer["numNodes"] * trainer["numProcPerNode"]
    assert trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == trainer["numProcPerNode"]


def test_the_example_for_skypilot(tmp_path: Path) -> None:
    """Its script, as SkyPilot would run it on a node, gives torchrun a process for each GPU."""
    task = yaml.safe_load((REPOSITORY / "examples" / "clusters" / "skypilot.yaml").read_text())
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "torchrun").write_text('#!/bin/bash\nprintf "%q " torchrun "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{BIN}:{os.environ['PATH']}",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    done = subprocess.run(["bash", "-c", task["run"]], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    gpus = int(task["resources"]["accelerators"].partition(":")[2])
    assert processes_of(words) == task["num_nodes"] * gpus
    assert options_of(words)["rdzv-endpoint"] == "10.0.0.1:29500"


@pytest.mark.slow
def test_two_nodes_meet_and_train(cli: Cli, tmp_path: Path, prefix: str) -> None:
    """The script on two "nodes" of this machine, one process each, with the real torchrun."""
    changes = {"parallel__dp": 2, "training__device": "cpu"}
    path = run_file(tmp_path, prefix, **changes)
    assert cli("launch", "torchrun", path, "--nodes", 2, "--output", tmp_path / "job.sh")[0] == 0
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    nodes = [
        subprocess.Popen(["bash", "job.sh", "localhost"], cwd=tmp_path, env=environment, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    assert [node.communicate(timeout=PATIENCE) and node.returncode for node in nodes] == [0, 0]
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_text().count("\n") == 8
