"""Measure the training speed on one GPU, relative to a large matmul and to other libraries.

    python -m benchmarks.train_gpu [--sequence 4096 8192] [--rounds 10] [--json results.json]
    python -m benchmarks.train_gpu --device cpu --tiny

The model has the blocks of Llama 3 8B, as many as should fit into the GPU's free memory. It trains in bf16 with fp32
master weights and fused AdamW, with one sequence per step. The benchmark compares fourfold with transformers, and with
torchtitan if it is installed. These contenders run one after another, because each of them fills the memory. Before
each contender, the benchmark measures the ceiling: the FLOP/s of an 8192³ matmul in bf16. If a contender fails, its row
shows the error. Needs ``pip install fourfold[benchmarks]``.
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
"""Number of bytes per parameter: the master weight, the gradient, and two moments in fp32, plus a copy of the weight in
bf16."""

MEMORY_SHARE = 0.85
"""Fraction of the free memory that the model and its training step may use, by our estimate."""


@dataclass(frozen=True)
class Row:
    """The measurements of a contender. If the contender failed, its error."""

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
            "benchmarks.train_gpu needs a GPU, but torch sees none here; --device cpu --tiny tries the script itself."
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
    """Measure every contender with one sequence length. For each of them, add a row to ``rows`` and to the JSON
    file."""
    layers = arguments.layers or (2 if arguments.tiny else layers_that_fit(sequence, device))
    model = {**(TINY if arguments.tiny else LLAMA3_8B), "num_hidden_layers": layers}
    options: dict[str, Any] = {"precision": "bf16", "device": device.type}
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
    """Return for each contender a function that makes its training step. The most important contenders come first,
    because the benchmark may run out of time."""
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
    assert row.step_seconds is not None
    ratio = "" if row.times_hugging_face is None else f"{row.times_hugging_face:8.2f}"
    print(
        f"{row.contender:26}{row.step_seconds * 1e3:9.1f}{row.tokens_per_second:10.0f}{row.tflops:10.2f}"
        f"{row.of_ceiling:12.1%}{row.peak_gib or 0:10.1f}{ratio}",
        flush=True,
    )


def _hugging_face(run: RunConfig, device: torch.device, compiled: bool) -> Step:
    """Return a step of transformers with fp32 weights and autocast. This corresponds to fourfold's bf16 with fp32
    master weights."""
    return hugging_face(run, device, autocast=torch.bfloat16, compiled=compiled, same_weights=False)


def _measure(
    name: str, maker: Callable[[], Step], run: RunConfig, device: torch.device, arguments: argparse.Namespace
) -> dict[str, float]:
    """Measure a contender, and return its figures as fields of ``Row``."""
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
    """Return a step's median seconds over the rounds, after a warm-up. When this function returns, the model can be
    freed."""
    loss = step(*random_batch(run, 0, device)).item()
    expected = math.log(run.model.vocab_size)
    assert abs(loss - expected) < 0.1 * expected, (
        f"{name}: a fresh model's loss is {loss:.2f}, not about {expected:.2f}"
    )
    batches = iter([random_batch(run, 1 + i, device) for i in range(rounds + 2)])
    return seconds_of(lambda: step(*next(batches)), device, rounds)


def matmul_ceiling(device: torch.device, size: int) -> float:
    """Return the FLOP/s of a matmul of two square bf16 matrices of this size: the median of 20 runs, after 10 runs that
    bring the GPU's clocks up."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(10):
        a @ b
    return 2 * size**3 / seconds_of(lambda: a @ b, device, rounds=20)


def layers_that_fit(sequence: int, device: torch.device) -> int:
    """Return how many blocks fit into the free memory, next to the embedding, the head, and full logits (which other
    libraries compute at once)."""
    one, two = (one_micro_batch_run({}, 1, sequence, {**LLAMA3_8B, "num_hidden_layers": n}).model for n in (1, 2))
    block = num_parameters(two) - num_parameters(one)
    # For its backward pass, a block that is not compiled saves about 16 bf16 tensors with the hidden width, and 6 with
    # the MLP's inner width.
    activations = 2 * sequence * (16 * one.hidden_size + 6 * one.intermediate_size)
    logits = 12 * sequence * one.vocab_size  # Logits in bf16 and in fp32, and their gradients.
    free, _ = torch.cuda.mem_get_info(device)
    left = MEMORY_SHARE * free - STATE_BYTES * (num_parameters(one) - block) - logits
    return max(1, min(32, int(left / (STATE_BYTES * block + activations))))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    add_tiny(parser)
    parser.add_argument("--sequence", type=int, nargs="+", help="default: 4096 8192")
    parser.add_argument("--layers", type=int, help="default: as many as fit")
    parser.add_argument("--rounds", type=int, default=10, help="number of timed steps of every contender")
    parser.add_argument("--no-compile", action="store_true", help="leave out the compiled contenders")
    parser.add_argument("--json", metavar="FILE", help="also write the table to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
