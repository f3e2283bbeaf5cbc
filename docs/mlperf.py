"""Write the tables of docs/mlperf.md: python docs/mlperf.py"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from validation_page.cells import percent, put_between, table

from fourfold.planning.calibration.machine_constants import constants_for
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of
from fourfold.planning.search.plan import Prediction, describe_layout, make_plan
from fourfold.planning.search.space import LIMITED, SearchLimits
from fourfold.run_file.load import make_run

PAGE = Path(__file__).parent / "mlperf.md"
MACHINE = "gb300"
COUNTS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Numbers of GPUs to plan for."""
PIPELINES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4))
HEADER = ("GPUs", "batch", "layout", "GB", "P(OOM)", "s/step", "tokens/s per GPU", "MFU")


@dataclass(frozen=True)
class Benchmark:
    """A model of MLPerf Training v6.0.

    ``batch`` returns the number of sequences in a step for a number of GPUs. ``cp`` lists the sizes of the axis cp to
    try. ``predictions`` is the number of layers for multi-token prediction."""

    preset: str
    seq_length: int
    batch: Callable[[int], int]
    cp: tuple[int, ...]
    predictions: int = 0

    def plan(self, gpus: int) -> Prediction:
        """Return the fastest layout, among the layouts that the page describes."""
        machine = load_machine(MACHINE)
        run = make_run(
            {
                "name": self.preset,
                "model": {"preset": self.preset, "num_nextn_predict_layers": self.predictions},
                "data": {"train": [{"path": "corpora/web"}]},
                "training": {
                    "global_batch_size": self.batch(gpus),
                    "micro_batch_size": 1,
                    "seq_length": self.seq_length,
                    "train_steps": 1,
                    "precision": "bf16",
                },
            }
        )
        limits = SearchLimits(
            fixed=(("y", 1), ("cp", self.cp)),
            zeros=(0, 1),
            recomputes=((0, 1, False), (1, 1, False), (2, 1, False)),
            micro_batches=(1, 2, 4),
            pipelines=PIPELINES,
            batch_parts=(1,),
        )
        base = workload_of(run).but(**dict.fromkeys(LIMITED, 1))
        return make_plan(base, machine, constants_for(machine), gpus, 1, limits).best


BENCHMARKS = (
    Benchmark("deepseek-v3", 4096, lambda gpus: 15360, (1,), predictions=1),
    Benchmark("gpt-oss-20b", 8192, lambda gpus: max(16, gpus // 8), (1, 2, 4, 8)),
)


def row(benchmark: Benchmark, gpus: int, best: Prediction) -> tuple[str, ...]:
    """Return the cells of the table's row for one number of GPUs. ``best`` is the fastest layout."""
    batch = benchmark.batch(gpus)
    return (
        f"{gpus:,}",
        f"{batch:,}",
        describe_layout(best.work),
        f"{best.memory_bytes / 1e9:.0f}",
        percent(best.p_oom),
        f"{best.seconds:.3g}",
        f"{batch * benchmark.seq_length / best.seconds / gpus:,.0f}",
        percent(best.utilization(best.work.model_flops())),
    )


def main() -> None:
    for benchmark in BENCHMARKS:
        rows = [row(benchmark, gpus, benchmark.plan(gpus)) for gpus in COUNTS]
        put_between(PAGE, f"docs/mlperf.py, {benchmark.preset}", table(HEADER, rows))


if __name__ == "__main__":
    main()
