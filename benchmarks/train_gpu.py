"""Measure the training speed on one GPU: model FLOP/s divided by the machine's own matmul ceiling, and the speed
relative to Hugging Face.

    python -m benchmarks.train_gpu [--sequence 4096 8192] [--rounds 10] [--json results.json]
    python -m benchmarks.train_gpu --device cpu --tiny

Blocks are as wide as Llama 3 8B's. There are as many blocks as should fit into the GPU's free memory, in bf16 with fp32
master weights and fused AdamW, with one sequence per step. The ceiling is an 8192³ matmul in bf16, measured before
every contender. Contenders run one after another, because each fills the memory. If a contender fails, its row has the
error. torchtitan is a contender if it is installed. Needs ``pip install fourfold[benchmarks]``.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import titan
from benchmarks.one_gpu import device_of, free_memory, memory_gib, process_group, seconds_of, write_rows
from benchmarks.options import add_tiny, failure_in
from benchmarks.peers import Step, hugging_face
from benchmarks.ranks import fourfold, one_micro_batch_run, random_batch
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.training.flops import flops_per_token

LLAMA3_8B = {"preset": "llama3-8b", "rope_scaling": None}
TINY = {"preset": "llama-tiny", "vocab_size": 512}

STATE_BYTES = 18
"""Number of bytes per parameter: master weight, gradient, and two moments in fp32, and a bf16 copy."""

MEMORY_SHARE = 0.85
"""Fraction of the free memory that the estimate may fill."""


@dataclass(frozen=True)
class Row:
    """Figures of a contender, or the error that ended it."""

    contender: str
    sequence: int
    layers: int
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tflops: float | None = None
    of_ceiling: float | None = None
    peak_gib: float | None = None
    reserved_gib: float | None = None
    outside_torch_gib: float | None = None
    times_hugging_face: float | None = None
    error: str | None = None


def main() -> int:
    arguments = _arguments()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.train_gpu needs a GPU, and torch sees none here; --device cpu --tiny tries the script itself."
        )
        return 2
    warnings.filterwarnings("ignore")
    device = device_of(arguments.device)
    rows: list[Row] = []
    with process_group(device):
        for sequence in arguments.sequence or ([64] if arguments.tiny else [4096, 8192]):
            _compare(sequence, device, arguments, rows)
    return 0 if any(row.error is None for row in rows) else 1


def _compare(sequence: int, device: torch.device, arguments: argparse.Namespace, rows: list[Row]) -> None:
    """Measure every contender, and add a row for each to ``rows`` and to the file of figures."""
    layers = arguments.layers or (2 if arguments.tiny else layers_that_fit(sequence, device))
    model = {**(TINY if arguments.tiny else LLAMA3_8B), "num_hidden_layers": layers}
    options = {"precision": "bf16", "device": device.type}
    eager = one_micro_batch_run({}, 1, sequence, model, **options)
    print(f"\nsequence {sequence}, {layers} layers, {num_parameters(eager.model) / 1e9:.2f} B parameters", flush=True)
    print(f"{'':26}{'ms/step':>9}{'tokens/s':>10}{'TFLOP/s':>10}{'of ceiling':>12}{'peak GiB':>10}{'× HF':>8}")
    theirs: dict[str, float] = {}
    for name, maker in _contenders(eager, sequence, model, options, device, arguments).items():
        figures: dict[str, Any] = {}
        with failure_in(figures):
            figures |= _measure(name, maker, eager, device, arguments)
            theirs[name] = figures["tokens_per_second"]
            rival = theirs.get("Hugging Face, compiled" if "compiled" in name else "Hugging Face")
            if "Hugging Face" not in name and rival is not None:
                figures["times_hugging_face"] = figures["tokens_per_second"] / rival
        row = Row(name, sequence, layers, **figures)
        free_memory(device)
        rows.append(row)
        _print(row)
        write_rows(arguments.json, device, [asdict(row) for row in rows])


def _contenders(
    eager: RunConfig,
    sequence: int,
    model: dict[str, Any],
    options: dict[str, Any],
    device: torch.device,
    arguments: argparse.Namespace,
) -> dict[str, Callable[[], Step]]:
    """Return a function that makes the step of each contender. The most informative contenders come first."""
    compiled = one_micro_batch_run({}, 1, sequence, model, **options, compile=True)
    makers: dict[str, Callable[[], Step]] = {
        "Hugging Face": lambda: _hugging_face(eager, device, compiled=False),
        "fourfold": lambda: fourfold(eager, device, quick_weights=True),
    }
    if not arguments.no_compile:
        makers["fourfold, compiled"] = lambda: fourfold(compiled, device, quick_weights=True)
        makers["Hugging Face, compiled"] = lambda: _hugging_face(eager, device, compiled=True)
    if titan.is_installed():
        makers["torchtitan"] = lambda: titan.torchtitan(eager, device, compiled=False)
        if not arguments.no_compile:
            makers["torchtitan, compiled"] = lambda: titan.torchtitan(eager, device, compiled=True)
    return makers


def _print(row: Row) -> None:
    if row.error is not None:
        print(f"{row.contender:26}  failed: {row.error.splitlines()[0][:120]}", flush=True)
        return
    ratio = "" if row.times_hugging_face is None else f"{row.times_hugging_face:8.2f}"
    print(
        f"{row.contender:26}{row.step_seconds * 1e3:9.1f}{row.tokens_per_second:10.0f}{row.tflops:10.2f}"
        f"{row.of_ceiling:12.1%}{row.peak_gib or 0:10.1f}{ratio}",
        flush=True,
    )


def _hugging_face(run: RunConfig, device: torch.device, compiled: bool) -> Step:
    """Return a step of fp32 weights with autocast, which is the library's equivalent of bf16 with fp32 master
    weights."""
    return hugging_face(run, device, autocast=torch.bfloat16, compiled=compiled, same_weights=False)


def _measure(
    name: str, maker: Callable[[], Step], run: RunConfig, device: torch.device, arguments: argparse.Namespace
) -> dict[str, float]:
    """Return the figures of a contender, as fields of ``Row``."""
    ceiling = matmul_ceiling(device, 256 if arguments.tiny else 8192)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = _step_seconds(name, maker(), run, device, arguments.rounds)
    tokens = run.training.seq_length
    flops = flops_per_token(run.model, tokens).training * tokens / seconds
    return {
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops": flops / 1e12,
        "of_ceiling": flops / ceiling,
        **memory_gib(device),
    }


def _step_seconds(name: str, step: Step, run: RunConfig, device: torch.device, rounds: int) -> float:
    """Return the median seconds over the rounds, after a warm-up. The model is freed when this returns."""
    loss = step(*random_batch(run, 0, device)).item()
    expected = math.log(run.model.vocab_size)
    assert abs(loss - expected) < 0.1 * expected, (
        f"{name}: a fresh model's loss is {loss:.2f}, not about {expected:.2f}"
    )
    batches = iter([random_batch(run, 1 + i, device) for i in range(rounds + 2)])
    return seconds_of(lambda: step(*next(batches)), device, rounds)


def matmul_ceiling(device: torch.device, size: int) -> float:
    """Return the FLOP/s of a size³ matmul in bf16: the median of 20 runs, after 10 runs to warm up the clocks."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        a @ b
    return 2 * size**3 / seconds_of(lambda: a @ b, device, rounds=20)


def layers_that_fit(sequence: int, device: torch.device) -> int:
    """Return how many blocks fit into the free memory, in addition to the embedding, the head, and another contender's
    logits."""
    one, two = (one_micro_batch_run({}, 1, sequence, {**LLAMA3_8B, "num_hidden_layers": n}).model for n in (1, 2))
    block = num_parameters(two) - num_parameters(one)
    # An eager block saves about 16 bf16 tensors of the hidden width and 6 of the inner width for its backward pass.
    activations = 2 * sequence * (16 * one.hidden_size + 6 * one.intermediate_size)
    logits = 12 * sequence * one.vocab_size  # bf16 and float32 logits, and the gradients of both.
    free, _ = torch.cuda.mem_get_info(device)
    left = MEMORY_SHARE * free - STATE_BYTES * (num_parameters(one) - block) - logits
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
