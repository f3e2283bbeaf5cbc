"""Compare the speed of one decoding step with Loki and with torch's fastest dense attention.

    python -m benchmarks.loki_decode [--rounds 30] [--contexts 4096,131072] [--kernels torch]

The benchmark times all operations of one layer. With Loki, these are: append to the cache, encode, score, select, and
attend. Loki and dense attention run alternately, so unrelated work on the machine slows both equally. The benchmark
tries several implementations of dense attention, all with a preallocated cache, and takes the fastest one for each
context. With OMP_NUM_THREADS=1, it measures processor time, which excludes unrelated work. Keys vary mostly along a few
directions, as real keys do, but the times do not depend on this.

On a GPU, each step is a CUDA graph, and CUDA events measure the time of several replays. By default, the contexts on a
GPU are the contexts that have a goal: 8,192, 32,768, and 131,072 tokens. Needs ``pip install fourfold[benchmarks]``,
and for compiled steps on a CPU ``fourfold[loki]``.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from benchmarks.cache_traffic import CacheTraffic, dense_bytes, floor_bytes
from benchmarks.one_gpu import name_of, round_seconds
from benchmarks.options import add_device, write_figures
from fourfold.inference.loki import LokiConfig
from fourfold.inference.loki.attend import decode
from fourfold.inference.loki.cache import GrowingLayer, LokiLayer
from fourfold.inference.loki.codes import Encoder
from fourfold.models.dtypes import DTYPES

GOALS = {
    ("cpu", 1, 32_768): 4.0,
    ("cpu", 1, 131_072): 7.0,
    ("cuda", 1, 131_072): 2.5,
    ("cuda", 8, 32_768): 2.0,
    ("cuda", 1, 8_192): 0.95,
}
"""Goals: the smallest ratio of the dense time to Loki's time that we accept, by device, batch size, and context. All
goals are for k = 2,048 keys."""

CONTEXTS = {"cpu": "4096,32768,131072", "cuda": "8192,32768,131072"}
KEYS = 2048
REPLAYS = 20
"""Number of steps between two CUDA events. With several steps, the time to launch them from the host hardly counts."""

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention layer (of Llama 3 8B), and the settings of Loki."""

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    d: int
    k: int
    """Number of keys to attend to. 0 means the default fraction of the context."""
    dtype: torch.dtype
    device: str
    kernels: str = "auto"

    def keys_of(self, context: int) -> int:
        return LokiConfig(d=self.d, k=self.k or None).key_count(context)


@dataclass(frozen=True)
class Row:
    """Results for one context. Times are medians over the rounds, and ``least_…`` are minima. The bytes that Loki reads
    are given as a multiple of the bytes of dense attention, and of the smallest possible number."""

    context: int
    dense: str
    dense_ms: float
    loki_ms: float
    least_dense_ms: float
    least_loki_ms: float
    goal: float | None
    share_of_dense_bytes: float
    share_of_floor_bytes: float | None

    @property
    def ratio(self) -> float:
        return self.dense_ms / self.loki_ms

    @property
    def least_ratio(self) -> float:
        return self.least_dense_ms / self.least_loki_ms


def main() -> int:
    arguments = _arguments()
    dtype = DTYPES[arguments.dtype]
    shape = Shape(
        arguments.batch, 32, 8, 128, arguments.d, arguments.k, dtype, arguments.device, arguments.kernels
    )  # fmt: skip
    header = f"{'context':>8}{'dense':>18}{'ms':>10}{'Loki ms':>10}{'ratio':>8}{'of least':>10}"
    print(f"{header}{'bytes/dense':>13}{'/floor':>8}  goal")
    rows: list[Row] = []
    for context in map(int, (arguments.contexts or CONTEXTS[arguments.device]).split(",")):
        rows.append(measure(shape, context, arguments.rounds))
        _print(rows[-1])
        record = {
            "torch": torch.__version__,
            "device": name_of(torch.device(arguments.device)),
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "shape": {**asdict(shape), "dtype": arguments.dtype},
            "rounds": arguments.rounds,
            "rows": [{**asdict(row), "ratio": row.ratio, "least_ratio": row.least_ratio} for row in rows],
        }
        write_figures(arguments.json, record)
    return 0


@torch.no_grad()
def measure(shape: Shape, context: int, rounds: int) -> Row:
    torch.manual_seed(0)
    step, traffic = loki_step(shape, context)
    steps = {"loki": step, **dense_steps(shape, context)}
    expected = steps["sdpa, grouped"]()
    for name, each in steps.items():
        if name != "loki":
            torch.testing.assert_close(each(), expected, rtol=2e-2, atol=2e-2)
    times = interleaved(steps, rounds, shape.device)
    medians = {name: statistics.median(of_step) * 1e3 for name, of_step in times.items()}
    best = min((name for name in steps if name != "loki"), key=medians.__getitem__)
    size = (context, shape.head_dim)
    itemsize = shape.dtype.itemsize
    floor = shape.batch * floor_bytes(*size, shape.d, shape.keys_of(context), shape.kv_heads, itemsize)
    dense = shape.batch * dense_bytes(*size, shape.kv_heads, itemsize)
    return Row(
        context,
        best,
        medians[best],
        medians["loki"],
        min(times[best]) * 1e3,
        min(times["loki"]) * 1e3,
        GOALS.get((shape.device, shape.batch, context)) if shape.k == KEYS else None,
        floor / dense if traffic is None else traffic / dense,
        None if traffic is None else traffic / floor,
    )


def loki_step(shape: Shape, context: int) -> tuple[Step, int | None]:
    """Return a function that runs one decoding step with Loki. On a CPU, also return the bytes that torch's operations
    read from the cache in one step."""
    basis_KDD = torch.linalg.qr(torch.randn(shape.kv_heads, shape.head_dim, shape.head_dim)).Q.to(shape.device)
    basis_KDd, k = basis_KDD[..., : shape.d].contiguous(), shape.keys_of(context)
    mean_KD, covariance_KDD = torch.zeros_like(basis_KDD[..., 0]), torch.eye(shape.head_dim, device=shape.device)
    encoder = Encoder.of(basis_KDd, basis_KDd, mean_KD, covariance_KDD.expand(shape.kv_heads, -1, -1))
    layer = LokiLayer(encoder, context)
    config = LokiConfig(d=shape.d, k=k, kernels=shape.kernels)
    _fill(layer, shape, context - 1)
    new, query = _tokens(shape, 1), _query(shape)

    def step(config: LokiConfig = config) -> Tensor:
        keys, values = layer.update(new, new)
        assert layer.code_BKSC is not None
        value_sum_BKD, scaling = layer.value_sum.of(values, None), shape.head_dim**-0.5
        out = decode(query, keys, values, value_sum_BKD, layer.code_BKSC, encoder, k, config, scaling)
        layer.crop(-1)
        return out

    if shape.device != "cpu":
        return step, None
    step()
    cache = [tensor for tensor in (layer.keys, layer.values, layer.code_BKSC) if tensor is not None]
    with CacheTraffic(cache) as traffic:
        step(config.model_copy(update={"kernels": "torch"}))
    return step, traffic.bytes_read


def dense_steps(shape: Shape, context: int) -> dict[str, Step]:
    """Return a function for each of torch's implementations of dense attention. Each function runs one decoding step:
    it appends a token to its own cache, and attends to all tokens."""
    attention = torch.nn.functional.scaled_dot_product_attention
    layer = GrowingLayer(context)
    _fill(layer, shape, context - 1)
    new, query_BND = _tokens(shape, 1), _query(shape)
    query_BKGD, query_BN1D = query_BND.unflatten(1, (shape.kv_heads, -1)), query_BND[:, :, None]

    def appended(attend: Callable[[Tensor, Tensor], Tensor]) -> Step:
        def step() -> Tensor:
            out = attend(*layer.update(new, new))
            layer.crop(-1)
            return out.reshape(query_BND.shape)

        return step

    def products(keys: Tensor, values: Tensor) -> Tensor:
        scores = torch.matmul(query_BKGD * shape.head_dim**-0.5, keys.transpose(-1, -2))
        return torch.matmul(torch.softmax(scores, -1), values)

    return {
        "sdpa, grouped": appended(lambda keys, values: attention(query_BKGD, keys, values)),
        "sdpa, enable_gqa": appended(lambda keys, values: attention(query_BN1D, keys, values, enable_gqa=True)),
        "matmul, softmax": appended(products),
    }


def interleaved(steps: dict[str, Step], rounds: int, device: str) -> dict[str, list[float]]:
    """Return the seconds of every step in every round. Each round runs all steps once."""
    runs = {name: step if device == "cpu" else _graph(step) for name, step in steps.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(rounds + 2):
        for name, run in runs.items():
            seconds = _seconds(run, device)
            if round_ >= 2:  # The first two rounds only warm up.
                times[name].append(seconds)
    return times


def _seconds(step: Callable[[], object], device: str) -> float:
    """Return the seconds of one step. On a GPU, this is the mean over several steps between two CUDA events. On a CPU
    with one thread, this is processor time."""
    if device != "cpu" or torch.get_num_threads() > 1:
        return round_seconds(step, torch.device(device), REPLAYS if device != "cpu" else 1)
    begin = time.process_time()
    step()
    return time.process_time() - begin


def _graph(step: Step) -> Callable[[], object]:
    """Record the step as a CUDA graph, and return a function that replays the graph."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _fill(layer: GrowingLayer, shape: Shape, count: int) -> None:
    for begin in range(0, count, 8192):
        tokens = _tokens(shape, min(8192, count - begin))
        layer.update(tokens, tokens)


def _tokens(shape: Shape, count: int) -> Tensor:
    """Return random keys. As with real keys, a few directions have most of the variance: the variance of direction i is
    proportional to 1/i."""
    scale_D = torch.arange(1, shape.head_dim + 1, device=shape.device) ** -0.5
    size = (shape.batch, shape.kv_heads, count, shape.head_dim)
    return (torch.randn(size, device=shape.device) * scale_D).to(shape.dtype)


def _query(shape: Shape) -> Tensor:
    return torch.randn(shape.batch, shape.heads, shape.head_dim, device=shape.device).to(shape.dtype)


def _print(row: Row) -> None:
    met = "" if row.goal is None else f"≥ {row.goal:g}  {'met' if row.ratio >= row.goal else 'MISSED'}"
    floor = "" if row.share_of_floor_bytes is None else f"{row.share_of_floor_bytes:.3f}"
    print(
        f"{row.context:8}{row.dense:>18}{row.dense_ms:10.2f}{row.loki_ms:10.2f}{row.ratio:7.2f}x{row.least_ratio:9.2f}x"
        f"{row.share_of_dense_bytes:13.3f}{floor:>8}  {met}",
        flush=True,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30, help="number of timed rounds")
    parser.add_argument("--contexts", help=f"default: {CONTEXTS}")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--d", type=int, default=32)
    parser.add_argument("--k", type=int, default=KEYS, help="number of keys to attend to. 0: Loki's default share")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES))
    parser.add_argument("--kernels", default="auto", choices=["auto", "torch", "numba", "triton"])
    add_device(parser)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.contexts, arguments.k, arguments.rounds = "256", 64 if arguments.k else 0, 2
    return arguments


if __name__ == "__main__":
    sys.exit(main())
