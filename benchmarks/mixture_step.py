"""Compare the training speed of mixture-of-experts blocks on one GPU with the transformers library.

    python -m benchmarks.mixture_step [--device cpu] [--rounds 5] [--json FILE]

The blocks are from Qwen3-30B-A3B (128 experts, 8 per token) and OLMoE (64 experts, 8 per token). A step has one
sequence of 4,096 tokens, in bf16 with fp32 master weights and fused AdamW. transformers runs its experts as grouped
matmuls ("grouped_mm", its default). Both libraries start from their own random weights. If one of them fails, its row
shows the error.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.host_waits import host_waits
from benchmarks.one_gpu import device_of, free_memory, memory_gib, process_group, seconds_of, write_rows
from benchmarks.options import add_device, failure_in
from benchmarks.peers import Step, hugging_face
from benchmarks.ranks import fourfold, one_micro_batch_run, random_batch
from fourfold.config.run import RunConfig
from fourfold.training.flops import flops_per_token

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b, 2 layers": {"preset": "qwen3-30b-a3b", "num_hidden_layers": 2},
    "olmoe-1b-7b, 4 layers": {"preset": "olmoe-1b-7b", "num_hidden_layers": 4},
}
TINY = {"tiny": {"preset": "moe-tiny"}}


def main() -> int:
    arguments = _arguments()
    warnings.filterwarnings("ignore")
    device, sequence = device_of(arguments.device), 32 if arguments.tiny else 4096
    rows: list[dict[str, Any]] = []
    print(f"{'model':26}{'contender':28}{'ms/step':>9}{'TFLOP/s':>10}{'peak GiB':>10}{'waits':>7}{'× HF':>8}")
    with process_group(device):
        for name, model in (TINY if arguments.tiny else MODELS).items():
            run = one_micro_batch_run({}, 1, sequence, model, precision="bf16", device=device.type)
            seconds: dict[str, float] = {}
            for contender, maker in contenders(run, device).items():
                row: dict[str, Any] = {"model": name, "contender": contender}
                with failure_in(row):
                    row |= measure(maker, run, device, arguments.rounds)
                    seconds[contender] = row["step_seconds"]
                    if contender == "fourfold" and TRANSFORMERS in seconds:
                        row["times_hugging_face"] = seconds[TRANSFORMERS] / seconds[contender]
                free_memory(device)
                rows.append(row)
                _print(row)
                write_rows(arguments.json, device, rows)
    return 1 if all("error" in row for row in rows) else 0


TRANSFORMERS = "transformers, grouped_mm"


def contenders(run: RunConfig, device: torch.device) -> dict[str, Callable[[], Step]]:
    options: dict[str, Any] = {"autocast": torch.bfloat16, "same_weights": False, "experts": "grouped_mm"}
    return {
        TRANSFORMERS: lambda: hugging_face(run, device, **options),
        "fourfold": lambda: fourfold(run, device, quick_weights=True),
    }


def measure(maker: Callable[[], Step], run: RunConfig, device: torch.device, rounds: int) -> dict[str, Any]:
    """Return the seconds of a step, its model TFLOP/s, its memory, and the lines of code that make the host wait for
    the device."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = maker()
    loss, expected = step(*random_batch(run, 0, device)).item(), math.log(run.model.vocab_size)
    assert abs(loss - expected) < 0.15 * expected, f"a fresh model's loss is {loss:.2f}, not about {expected:.2f}"
    batches = iter([random_batch(run, 1 + i, device) for i in range(rounds + 3)])
    seconds = seconds_of(lambda: step(*next(batches)), device, rounds)
    waits = host_waits(device, lambda: step(*next(batches)))
    tokens = run.training.seq_length
    tflops = flops_per_token(run.model, tokens).training * tokens / seconds / 1e12
    return {"step_seconds": seconds, "tflops": tflops, **memory_gib(device), "waits": dict(waits.most_common(8))}


def _print(row: dict[str, Any]) -> None:
    begin = f"{row['model']:26}{row['contender']:28}"
    if "error" in row:
        print(f"{begin}  failed: {row['error'].splitlines()[0][:120]}", flush=True)
        return
    ratio = f"{row['times_hugging_face']:8.2f}" if "times_hugging_face" in row else ""
    figures = f"{row['step_seconds'] * 1e3:9.1f}{row['tflops']:10.2f}{row.get('peak_gib', 0):10.1f}"
    print(f"{begin}{figures}{sum(row['waits'].values()):7}{ratio}", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of timed steps")
    add_device(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
