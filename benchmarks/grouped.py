"""Compare grouped matmuls of experts with a loop over the experts, and with one matmul that has the same FLOPs.

    python -m benchmarks.grouped [--device cpu] [--json FILE]

A grouped matmul runs the matmuls of all experts in one kernel. The dtype is bf16. The sizes come from the up
projections of Mixtral 8x7B, OLMoE, and Qwen3-30B-A3B. Experts get different numbers of rows.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from benchmarks.one_gpu import device_of, seconds_of, write_rows
from benchmarks.options import add_device, failure_in
from fourfold.models.grouped import Groups, grouped_matmul

SIZES = {
    "mixtral-8x7b": (8, 4096, 14336, 2048),
    "olmoe": (64, 2048, 1024, 1024),
    "qwen3-30b-a3b": (128, 2048, 768, 512),
}
"""By model: the number of experts, of input features, and of output features, and the mean number of rows (tokens) per
expert."""
TINY = {"tiny": (4, 64, 48, 8)}


def main() -> int:
    arguments = _arguments()
    device = device_of(arguments.device)
    rows: list[dict[str, Any]] = []
    columns = ("forward", "one matmul", "a loop", "forward and backward")
    print(f"{'TFLOP/s':16}" + "".join(f"{column:>22}" for column in columns))
    for name, sizes in (TINY if arguments.tiny else SIZES).items():
        row: dict[str, Any] = {"model": name, "experts, inputs, outputs, rows": sizes}
        with failure_in(row):
            row["tflops"] = speeds(*sizes, device, rounds=2 if arguments.tiny else 20)
            print(f"{name:16}" + "".join(f"{row['tflops'][column]:22.2f}" for column in columns), flush=True)
        if "error" in row:
            print(f"{name:16}  failed: {row['error'].splitlines()[0][:120]}", flush=True)
        rows.append(row)
        write_rows(arguments.json, device, rows)
    return 1 if all("error" in row for row in rows) else 0


def speeds(experts: int, inputs: int, outputs: int, mean: int, device: torch.device, rounds: int) -> dict[str, float]:
    """Return the TFLOP/s of grouped matmuls, of the loop, and of the single matmul, by the table's columns."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(mean // 2, mean * 3 // 2, (experts,), generator=generator)
    groups, sizes = Groups(counts.to(device)), counts.tolist()
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    rows = torch.randn(sum(sizes), inputs, **options).requires_grad_()
    weights = torch.randn(experts, outputs, inputs, **options).requires_grad_()
    grad = torch.randn(sum(sizes), outputs, **options)
    plain_rows, plain_weights = rows.detach(), weights.detach()

    def both() -> None:
        torch.autograd.grad(grouped_matmul(rows, weights, groups), (rows, weights), grad)

    def loop() -> None:
        for part, weight in zip(plain_rows.split(sizes), plain_weights, strict=True):
            part @ weight.T

    repeats = 5 if device.type == "cuda" else 1
    flops = 2 * sum(sizes) * inputs * outputs
    works = {
        "forward": (flops, lambda: grouped_matmul(plain_rows, plain_weights, groups)),
        "one matmul": (flops, lambda: plain_rows @ plain_weights[0].T),
        "a loop": (flops, loop),
        "forward and backward": (3 * flops, both),
    }
    return {name: count / seconds_of(work, device, rounds, repeats) / 1e12 for name, (count, work) in works.items()}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add_device(parser)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
