"""Measure how well the planner predicts step times on this machine, before and after it is fitted to measured steps.

    python -m benchmarks.measured_plan [--device cpu] [--machine machine.toml] [--json FILE]

The benchmark runs the commands that a user would run. It trains a few steps of a model with the blocks of Llama 3 8B,
with and without recompute. It predicts these steps with the machine file of --machine. (The default is a file that
comes with fourfold.) Then it fits the planner's constants to all runs except the last one, and predicts the last run.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.one_gpu import device_of, name_of
from benchmarks.options import add_device, write_figures
from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.calibration.measured_run import row_of_run
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import predict
from fourfold.run_file.load import load_run

RUN_FILE = """name = "{name}"
output_dir = "{folder}"

[model]
{model}

[data]
source = "python-stdlib"

[training]
micro_batch_size = 1
global_batch_size = 2
seq_length = {sequence}
train_steps = {steps}
precision = "bf16"
device = "{device}"

[activation_checkpoint]
mode = "{recompute}"

[checkpoint]
save_last = false
"""
WIDE = 'preset = "llama3-8b"\nnum_hidden_layers = {layers}'
RUNS = {"plain": ("none", 4), "recomputed": ("full", 4), "deep": ("none", 6)}
"""For each run by name, its recompute mode and its number of layers."""


def main() -> int:
    arguments = _arguments()
    device = device_of(arguments.device)
    base = arguments.machine or ("dgx-h100" if device.type == "cuda" else "laptop")
    record: dict[str, Any] = {"torch": torch.__version__, "device": name_of(device), "machine": base, "runs": {}}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        finished = []
        runs = RUNS if not arguments.tiny else {name: RUNS[name] for name in ("plain", "deep")}
        for run, (recompute, layers) in runs.items():
            try:
                train(folder, run, recompute, layers, arguments)
            except subprocess.CalledProcessError as error:
                record["runs"][run] = {"error": (error.stderr or "")[-2000:]}
            else:
                finished.append(run)
                measured = row_of_run(folder / run / "metrics.jsonl", load_machine(base))
                record["runs"][run] = {"step_seconds": measured.seconds, "memory_gb": measured.memory_gb}
            print(f"{run}: {record['runs'][run]}", flush=True)
            write_figures(arguments.json, record)
        if not finished:
            return 1
        *known, held_out = finished
        record["held_out"] = held_out
        record["before"] = validated(table(folder, finished, base))
        write_figures(arguments.json, record)
        if known:
            fitting, asking = table(folder, known, base), table(folder, [held_out], base)
            record["after"] = validated(asking, "--calibrate-on", fitting)
            metrics = [word for run in known for word in ("--from", str(folder / run / "metrics.jsonl"))]
            words = ("--out", folder / "fitted.toml", "--machine", base, *metrics, "--json")
            record["fit"] = json.loads(fourfold("machine", "calibrate", *words))
        for run in finished:
            record["runs"][run]["predicted_before"] = predicted(folder, run, base)
            if known:
                record["runs"][run]["predicted_after"] = predicted(folder, run, str(folder / "fitted.toml"))
            print(f"{run}: {record['runs'][run]}", flush=True)
        write_figures(arguments.json, record)
    return 0


def predicted(folder: Path, name: str, machine: str) -> float:
    """Return the step time in seconds that ``fourfold plan --machine MACHINE`` predicts for a run."""
    loaded = load_machine(machine)
    return predict(workload_of(load_run(folder / f"{name}.toml")), loaded, constants_for(loaded)).seconds


def train(folder: Path, name: str, recompute: str, layers: int, arguments: argparse.Namespace) -> None:
    """Run ``fourfold train`` with one of the runs, which writes its metrics to FOLDER/NAME."""
    tiny = arguments.tiny
    sizes = {"sequence": 64 if tiny else 4096, "steps": 6 if tiny else 12, "device": arguments.device}
    model = f'preset = "llama-tiny"\nnum_hidden_layers = {layers}' if tiny else WIDE.format(layers=layers)
    text = RUN_FILE.format(name=name, folder=folder, model=model, recompute=recompute, **sizes)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    fourfold("train", path)


def validated(rows: Path, *options: object) -> dict[str, Any]:
    """Return the output of ``fourfold plan validate``."""
    result: dict[str, Any] = json.loads(fourfold("plan", "validate", rows, "--rows", "--json", *options))
    return result


def table(folder: Path, names: list[str], machine: str) -> Path:
    """Write a table of measured rows, with one row for each run, as ``fourfold plan validate`` reads it. Return its
    path."""
    rows = []
    for name in names:
        run, row = load_run(folder / f"{name}.toml"), row_of_run(folder / name / "metrics.jsonl", load_machine(machine))
        model, training = run.model, run.training
        rows.append(
            {
                "row_id": name,
                "source": "this machine",
                "machine": machine,
                "gpus": 1,
                "layers": model.num_hidden_layers,
                "hidden": model.hidden_size,
                "ffn_hidden": model.intermediate_size,
                "mlp": "swiglu",
                "heads": model.num_attention_heads,
                "kv_heads": model.num_key_value_heads,
                "head_dim": model.head_dim,
                "vocab": model.padded_vocab_size,
                "seq_len": training.seq_length,
                "global_batch": training.global_batch_size,
                "micro_batch": training.micro_batch_size,
                "precision": "bf16",
                "tp": 1,
                "pp": 1,
                "program": "fourfold",
                "sharding": "none",
                "recompute": run.activation_checkpoint.mode,
                "step_seconds": row.seconds,
                "memory_gb": row.memory_gb or "",
            }
        )
    path = folder / f"{'-'.join(names)}.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def fourfold(*words: object) -> str:
    """Run a command of fourfold, and return its output."""
    command = [sys.executable, "-m", "fourfold", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr, flush=True)
    done.check_returncode()
    return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--machine", metavar="FILE", help="default: dgx-h100 for a GPU, laptop for a CPU")
    add_device(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
