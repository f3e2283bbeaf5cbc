"""Training speed on one GPU: model FLOP/s over the machine's own matmul ceiling, and against Hugging Face.

    python -m benchmarks.train_gpu [--sequence 4096 8192] [--rounds 10] [--json results.json]
    python -m benchmarks.train_gpu --device cpu --tiny

Blocks as wide as Llama 3 8B's, as many as the GPU's free memory is estimated to hold; bf16 with fp32 master weights and
fused AdamW; one sequence a step. The ceiling is an 8192³ product in bf16, measured beside every contender. Contenders
run one after the other, since each fills the memory. Needs ``pip install fourfold[benchmarks]``.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.options import add_tiny
from benchmarks.peers import Step, hugging_face
from benchmarks.ranks import fourfold, one_micro_batch_run, random_batch
from fourfold.config.run import RunConfig
from fourfold.training.flops import flops_per_token

LLAMA3_8B = {"preset": "llama3-8b", "rope_scaling": None}
TINY = {"preset": "llama-tiny", "vocab_size": 512}

STATE_BYTES = 18
"""Bytes of a parameter: master weight, gradient and two moments in fp32, and its bf16 copy."""

MEMORY_SHARE = 0.85
"""Share of the free memory that the estimate may fill."""


@dataclass(frozen=True)
class Row:
    contender: str
    sequence: int
    layers: int
    step_seconds: float
    tokens_per_second: float
    tflops: float
    of_ceiling: float
    peak_gib: float
    times_hugging_face: float | None = None


def main() -> int:
    arguments = _arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.train_gpu needs a GPU, and torch sees none here; --device cpu --tiny tries the script itself."
        )
        return 2
    warnings.filterwarnings("ignore")
    device = torch.device(arguments.device)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        for sequence in arguments.sequence or ([64] if arguments.tiny else [4096, 8192]):
            rows += _compare(sequence, device, arguments)
        dist.destroy_process_group()
    if arguments.json:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
        record = {"torch": torch.__version__, "device": name, "rows": [asdict(row) for row in rows]}
        Path(arguments.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0


def _compare(sequence: int, device: torch.device, arguments: argparse.Namespace) -> list[Row]:
    layers = arguments.layers or (2 if arguments.tiny else layers_that_fit(sequence, device))
    model = {**(TINY if arguments.tiny else LLAMA3_8B), "num_hidden_layers": layers}
    options = {"precision": "bf16", "device": device.type}
    eager = one_micro_batch_run({}, 1, sequence, model, **options)
    compiled = one_micro_batch_run({}, 1, sequence, model, **options, compile=True)
    makers: dict[str, Callable[[], Step]] = {
        "Hugging Face": lambda: _hugging_face(eager, device, compiled=False),
        "fourfold": lambda: fourfold(eager, device, quick_weights=True),
    }
    if not arguments.no_compile:
        makers["Hugging Face, compiled"] = lambda: _hugging_face(eager, device, compiled=True)
        makers["fourfold, compiled"] = lambda: fourfold(compiled, device, quick_weights=True)
    print(f"\nsequence {sequence}, {layers} layers, {eager.model.num_parameters / 1e9:.2f} B parameters", flush=True)
    print(f"{'':26}{'ms/step':>9}{'tokens/s':>10}{'TFLOP/s':>10}{'of ceiling':>12}{'peak GiB':>10}{'× HF':>8}")
    rows: list[Row] = []
    for name, maker in makers.items():
        row = _measure(name, maker, eager, device, arguments)
        same_mode = [r for r in rows if r.contender == name.replace("fourfold", "Hugging Face")]
        if same_mode:
            row = Row(**{**asdict(row), "times_hugging_face": row.tokens_per_second / same_mode[0].tokens_per_second})
        rows.append(row)
        ratio = "" if row.times_hugging_face is None else f"{row.times_hugging_face:8.2f}"
        print(
            f"{name:26}{row.step_seconds * 1e3:9.1f}{row.tokens_per_second:10.0f}{row.tflops:10.2f}"
            f"{row.of_ceiling:12.1%}{row.peak_gib:10.1f}{ratio}",
            flush=True,
        )
    return rows


def _hugging_face(run: RunConfig, device: torch.device, compiled: bool) -> Step:
    """fp32 weights under autocast: the library's equal of bf16 with fp32 master weights."""
    return hugging_face(run, device, autocast=torch.bfloat16, compiled=compiled, same_weights=False)


def _measure(
    name: str, maker: Callable[[], Step], run: RunConfig, device: torch.device, arguments: argparse.Namespace
) -> Row:
    ceiling = matmul_ceiling(device, 256 if arguments.tiny else 8192)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = _step_seconds(name, maker(), run, device, arguments.rounds)
    tokens = run.training.seq_length
    tflops = flops_per_token(run.model, tokens).training * tokens / seconds / 1e12
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Row(
        name,
        run.training.seq_length,
        run.model.num_hidden_layers,
        seconds,
        tokens / seconds,
        tflops,
        tflops * 1e12 / ceiling,
        peak,
    )


def _step_seconds(name: str, step: Step, run: RunConfig, device: torch.device, rounds: int) -> float:
    """The median over the rounds, warmed up. The model goes when this returns."""
    loss = step(*random_batch(run, 0, device)).item()
    expected = math.log(run.model.vocab_size)
    assert abs(loss - expected) < 0.1 * expected, (
        f"{name}: a fresh model's loss is {loss:.2f}, not about {expected:.2f}"
    )
    for i in range(2):
        step(*random_batch(run, 1 + i, device)).item()
    batches = [random_batch(run, 3 + i, device) for i in range(rounds)]
    return statistics.median(_seconds(lambda batch=batch: step(*batch), device) for batch in batches)


def matmul_ceiling(device: torch.device, size: int) -> float:
    """FLOP/s of a size³ product in bf16: the median of 20, after 10 to warm the clocks."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        a @ b
    return 2 * size**3 / statistics.median(_seconds(lambda: a @ b, device) for _ in range(20))


def _seconds(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def layers_that_fit(sequence: int, device: torch.device) -> int:
    """How many blocks the free memory holds beside the embedding, the head and a rival's whole logits."""
    one, two = (one_micro_batch_run({}, 1, sequence, {**LLAMA3_8B, "num_hidden_layers": n}).model for n in (1, 2))
    block = two.num_parameters - one.num_parameters
    # An eager block stores about 16 hidden-wide and 6 inner-wide bf16 tensors for its backward.
    activations = 2 * sequence * (16 * one.hidden_size + 6 * one.intermediate_size)
    logits = 12 * sequence * one.vocab_size  # bf16, float32, and the gradients of both
    free, _ = torch.cuda.mem_get_info(device)
    left = MEMORY_SHARE * free - STATE_BYTES * (one.num_parameters - block) - logits
    return max(1, min(32, int(left / (STATE_BYTES * block + activations))))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_tiny(parser)
    parser.add_argument("--sequence", type=int, nargs="+", help="default: 4096 8192")
    parser.add_argument("--layers", type=int, help="default: what fits")
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of every contender")
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled contenders out")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
