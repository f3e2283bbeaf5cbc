"""Everything that only a GPU can answer, in one go.

    python -m benchmarks.gpu OUT [--device cpu --tiny]

Each part is a program of its own with ten minutes at most; a part that fails is recorded and the others go on. OUT gets
the output of each, and gpu.json with the figures of all. Needs torch ≥ 2.11 and no network.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import add_tiny

SECONDS = 600
"""Time limit of each part."""


def main() -> int:
    arguments = _arguments()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    results = {}
    for name, command in parts(arguments, out).items():
        print(f"{name} … ", end="", flush=True)
        results[name] = outcome_of(name, command, out)
        print(f"{results[name]['result']} in {results[name]['seconds']:.0f} s", flush=True)
    record = {"torch": torch.__version__, "device": _name(arguments.device), "parts": results}
    (out / "gpu.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"all figures are in {out / 'gpu.json'}")
    return 0 if all(result["result"] == "done" for result in results.values()) else 1


def parts(arguments: argparse.Namespace, out: Path) -> dict[str, list[str]]:
    """The programs, by name; each writes <name>.json into ``out``, or prints JSON."""
    device, tiny = ["--device", arguments.device], ["--tiny"] if arguments.tiny else []
    found = {"doctor": ["-m", "fourfold", "doctor", "--json"]}
    for name in ("kernels", "one_step", "products", "train_gpu", "loki_decode"):
        found[name] = ["-m", f"benchmarks.{name}", *device, *tiny, "--json", str(out / f"{name}.json")]
    if arguments.device == "cuda":
        found["loki_decode"] += ["--dtype", "bf16"]
    if arguments.tiny:
        found["train_gpu"] += ["--no-compile", "--rounds", "1"]
    else:
        found["calibrate"] = ["-m", "fourfold", "calibrate", "--out", str(out / "machine.toml"), "--json"]
    processes = torch.cuda.device_count() if arguments.device == "cuda" else 2
    if processes > 1:
        found["parity"] = parity_under_torchrun(processes)
        options = [*device, *tiny, "--pp", str(processes), "--steps", "3", "--json", str(out / "pipeline_bubble.json")]
        found["pipeline_bubble"] = ["-m", "benchmarks.pipeline_bubble", *options]
    return found


def parity_under_torchrun(processes: int) -> list[str]:
    """Parity on x = 2 and y = 2, as far as the number of processes has these factors, and z."""
    x = 2 if processes % 2 == 0 else 1
    y = 2 if processes % 4 == 0 else 1
    sizes = {"x": x, "y": y, "z": processes // (x * y), "dp": 1, "pp": 1}
    settings = [word for axis, size in sizes.items() for word in ("--set", f"parallel.{axis}={size}")]
    settings += ["--set", f"training.global_batch_size={4 * processes}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, "-m", "fourfold", "parity", "examples/parity.toml", "--json", *settings]


def outcome_of(name: str, command: list[str], out: Path) -> dict[str, Any]:
    """Run a part; its result, seconds, and figures where it has written or printed any."""
    begin = time.perf_counter()
    text, errors = out / f"{name}.txt", out / f"{name}.err"
    with text.open("w") as output, errors.open("w") as error_output:
        try:
            done = subprocess.run(
                [sys.executable, *command], stdout=output, stderr=error_output, timeout=SECONDS, check=False
            )
            result = "done" if done.returncode == 0 else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            result = f"not done in {SECONDS} s"
    written = out / f"{name}.json"
    try:
        figures = json.loads((written if written.exists() else text).read_text(encoding="utf-8"))
    except ValueError:
        figures = None
    return {"result": result, "seconds": time.perf_counter() - begin, "figures": figures}


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder for the results")
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    add_tiny(parser)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu --tiny tries the script itself")
    return arguments


if __name__ == "__main__":
    raise SystemExit(main())
