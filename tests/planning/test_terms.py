"""Each term of the step's time follows its source."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fourfold.config.model import ModelConfig
from fourfold.config.presets import PRESETS
from fourfold.config.run import ParallelConfig
from fourfold.config.stages import SPLIT_BACKWARD
from fourfold.parallel.attention.ring import block_of_step
from fourfold.planning.budget import checkpoint_interval, costs
from fourfold.planning.cost.attention_time import kernel_of, keys_computed
from fourfold.planning.cost.block_time import block_time
from fourfold.planning.cost.optimizer_cost import MOVED_BYTES
from fourfold.planning.cost.stage_split import in_flight
from fourfold.planning.cost.step import step_parts
from fourfold.planning.cost.terms.bubble import bubble_seconds
from fourfold.planning.cost.terms.collective import (
    gather_seconds,
    group_of,
    reduce_seconds,
    shard_group_of,
    shard_seconds,
)
from fourfold.planning.cost.terms.host import OPTIMIZER_KERNELS, overlapped
from fourfold.planning.cost.terms.matmul import matmul_seconds
from fourfold.planning.machines.constants import prior_constants
from fourfold.planning.machines.machine import load_machine
from fourfold.planning.run_workload import workload_of_model
from fourfold.planning.workload import CP_METHODS, SCHEDULES

A100 = load_machine("dgx-a100")
PRIOR = prior_constants()


def matmul(m: int, n: int, k: int, bandwidth: float = 2e12) -> float:
    return float(matmul_seconds(m, n, k, rate=270e12, units=108, bandwidth=bandwidth, item=2))


def test_a_wave_that_is_not_full_costs_as_much_as_a_full_one() -> None:
    one_wave = matmul(256 * 12, 128 * 9, 4096)  # 108 tiles, one for each unit
    assert matmul(256 * 12, 128 * 9 - 100, 4096) == pytest.approx(one_wave)
    assert matmul(256 * 12, 128 * 9 + 1, 4096) > 1.2 * one_wave


def test_large_matmuls_reach_the_rate_and_thin_matmuls_are_memory_bound() -> None:
    size = 16384
    assert 0.9 < 2 * size**3 / matmul(size, size, size) / 270e12 <= 1
    assert matmul(1, 8192, 8192) >= 2 * 8192 * 8192 / 2e12


def test_small_depth_is_inefficient() -> None:
    per_flop = [matmul(8192, 8192, k) / k for k in (64, 512, 4096)]
    assert per_flop[0] > 1.5 * per_flop[1] > 1.5 * per_flop[2]


def test_an_all_reduce_moves_twice_what_a_gather_moves() -> None:
    group = group_of(8, 1, A100, PRIOR)
    size = 1e9
    assert reduce_seconds(size, 1, group) == pytest.approx(2 * gather_seconds(size, 1, group), rel=1e-2)
    assert gather_seconds(size, 1, group) == pytest.approx(7 / 8 * size / (0.75 * 300e9), rel=1e-2)
    assert gather_seconds(size, 3, group_of(1, 1, A100, PRIOR)) == 0


def test_two_levels_take_fewer_steps_and_send_as_much_over_the_network() -> None:
    one, two = (shard_group_of(1024, 1, per_node, A100, PRIOR) for per_node in (1, 8))
    small, large = 1e3, 1e13
    steps = PRIOR.latency * (7 * A100.intra_hop + 128 * A100.inter_hop + 2 * A100.base)
    assert shard_seconds(small, 1, two) == pytest.approx(steps, rel=1e-2)
    assert shard_seconds(small, 1, one) == gather_seconds(small, 1, group_of(1024, 1, A100, PRIOR))
    assert shard_seconds(small, 1, two) < shard_seconds(small, 1, one) / 2
    inside = gather_seconds(large, 1, group_of(8, 1, A100, PRIOR))
    assert shard_seconds(large, 1, two) - inside == pytest.approx(shard_seconds(large, 1, one), rel=1e-2)


def test_one_level_takes_as_long_as_one_ring() -> None:
    for ranks, per_node in ((8, 8), (4, 8), (64, 1)):
        group = shard_group_of(ranks, 1, per_node, A100, PRIOR)
        assert shard_seconds(1e9, 2, group) == gather_seconds(1e9, 2, group_of(ranks, 1, A100, PRIOR))


def test_groups_of_one_node_share_its_adapters() -> None:
    whole_node = group_of(16, 1, A100, PRIOR)  # two nodes of 8 GPUs in one ring
    one_gpu_a_node = group_of(2, 8, A100, PRIOR)  # eight such rings share the network adapters
    assert whole_node.bandwidth == pytest.approx(0.75 * 200e9)
    assert one_gpu_a_node.bandwidth == pytest.approx(0.75 * 200e9 / 8)
    assert (whole_node.nodes, one_gpu_a_node.nodes, one_gpu_a_node.inside) == (2, 2, 1)


def test_a_nvlink_domain_is_wider_than_a_node() -> None:
    assert group_of(72, 1, load_machine("gb200"), PRIOR).nodes == 1
    assert group_of(144, 1, load_machine("gb200"), PRIOR).nodes == 2


def test_two_dies_of_a_package_are_the_fastest_pair() -> None:
    frontier = load_machine("frontier")
    assert group_of(2, 1, frontier, PRIOR).bandwidth > group_of(2, 2, frontier, PRIOR).bandwidth


def test_latency_grows_with_a_ring_and_less_with_a_tree() -> None:
    small = [gather_seconds(8, 1, group_of(n, 1, A100, PRIOR)) for n in (64, 512)]
    assert 7 < small[1] / small[0] < 9
    tree = [reduce_seconds(8, 1, group_of(n, 1, A100, PRIOR)) for n in (64, 512)]
    assert tree[1] / tree[0] < 2


PIPELINES = [
    (schedule, chunks, pp, micro_batches)
    for schedule, chunks in (
        ("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("LoopedBFS", 2),
        ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 4), ("ZBVZeroBubble", 2), ("DualPipeV", 2),
    )
    for pp, micro_batches in ((4, 24), (8, 15), (4, 6), (8, 5), (8, 2), (4, 1))
    if schedule != "DualPipeV" or micro_batches >= 2 * pp
]  # fmt: skip


@pytest.mark.parametrize("backward", [2.0, 3.0])
@pytest.mark.parametrize(("schedule", "chunks", "pp", "micro_batches"), PIPELINES)
def test_bubble_and_micro_batches_in_flight_equal_the_real_schedules(
    schedule: str, chunks: int, pp: int, micro_batches: int, backward: float
) -> None:
    from benchmarks.pipeline_times import timeline
    from fourfold.parallel.pipeline.schedule import schedule_ops

    grid = ParallelConfig(pp=pp, schedule=schedule, stages_per_rank=max(chunks, 2))
    ran = schedule_ops(grid, micro_batches)
    end = max(rank[-1].end for rank in timeline(ran, grid, backward))
    number = SCHEDULES.index(schedule)
    told = bubble_seconds(number, pp, chunks, micro_batches, 1.0, backward / 2, backward / 2)
    # torch builds its schedules as if each half of a backward pass took as long as a forward pass.
    exact = backward == 2 or schedule not in SPLIT_BACKWARD
    step = micro_batches * (1 + backward) + float(told)
    assert step == pytest.approx(end, rel=1e-6 if exact and schedule != "ZBVZeroBubble" else 0.03)

    work = workload_of_model(ModelConfig(**PRESETS["gpt-5b"])).but(seq_length=1, global_batch_size=micro_batches, pp=pp,
                   schedule=number, stages_per_rank=chunks)  # fmt: skip
    told = [float(in_flight(work, rank)) for rank in range(pp)]
    held = [max(np.cumsum([(op.kind == "F") - (op.kind in ("B", "W")) for op in ops])) / chunks for ops in ran]
    assert told == pytest.approx(held, abs=0.5)


def test_all_wait_for_the_slowest_device() -> None:
    work = workload_of_model(ModelConfig(**PRESETS["gpt-5b"])).but(
        seq_length=2048, global_batch_size=512, z=64, dp=np.array([2, 8, 32])
    )
    devices, nodes, equal = (
        step_parts(work, replace(A100, spread=spread), replace(PRIOR, dispersion=dispersion))["compute"]
        for spread, dispersion in ((0.02, 0.005), (0.0, 0.005), (0.0, 0.0))
    )
    gpus = np.array([128, 512, 2048])
    assert devices / equal == pytest.approx(1 + 0.02 * np.sqrt(2 * np.log(gpus)))
    assert nodes / equal == pytest.approx(1 + 0.005 * np.sqrt(2 * np.log(gpus / 8)))


def test_host_and_device_overlap() -> None:
    assert overlapped(1.0, 0.1) == pytest.approx(1.0, rel=1e-3)
    assert overlapped(0.1, 1.0) == pytest.approx(1.0, rel=1e-3)
    assert 1.0 < overlapped(1.0, 1.0) < 1.25


def test_the_optimizer_reads_and_writes_every_state_once() -> None:
    work = workload_of_model(ModelConfig(**PRESETS["llama3-8b"])).but(seq_length=2048, global_batch_size=8)
    entries = work.model.num_hidden_layers * work.model.block_weights + work.table_weights
    moving = entries * MOVED_BYTES["adamw"] / (PRIOR.memory * A100.memory_bandwidth)
    launching = OPTIMIZER_KERNELS * PRIOR.launch * A100.launch
    assert float(step_parts(work, A100, PRIOR)["optimizer"]) == pytest.approx(moving + launching)


def test_memory_moved_for_weights() -> None:
    """Count the bytes for bf16 weights with fp32 gradients. The gradient of the first micro-batch is cast or copied (2
    + 4 bytes), and each later gradient is added to it (2 + 4 + 4). A sharded gradient is copied in every micro-batch.
    Gathered weights are copied twice (2 + 2 bytes each)."""
    work = workload_of_model(ModelConfig(**PRESETS["llama3-8b"])).but(seq_length=8192, global_batch_size=16, dp=8)
    machine = load_machine("dgx-h100")

    def moved(**changes: int | bool) -> float:
        """Return the bytes of a step for each entry of the blocks and of both tables."""
        here = work.but(**changes)
        without = here.but(z=1, zero=0, dp=here.layout.z * here.layout.dp, fuses_accumulation=True)
        seconds = []
        for case in (here, without):
            parts = step_parts(case, machine, replace(PRIOR, memory=1.0))
            seconds.append(float(parts["compute"] + parts["logits"]))
        entries = (
            here.model.num_hidden_layers * here.model.block_weights
            + 2 * here.model.padded_vocab_size * here.model.hidden_size
        )
        return (seconds[0] - seconds[1]) * machine.memory_bandwidth * here.layout.x / entries

    assert moved() == moved(zero=1) == pytest.approx(6 + 10)
    assert moved(x=2, dp=4) == pytest.approx(6 + 3 * 10)
    assert moved(zero=2) == pytest.approx(2 * 6)
    assert moved(z=8, dp=1) == moved(zero=3) == pytest.approx(2 * (6 + 2 * 4))
    assert moved(z=4, dp=2, zero=1) == pytest.approx(6 + 10 + 2 * 2 * 4)
    for zero in range(3):  # one micro-batch
        assert moved(micro_batch_size=2, zero=zero) == pytest.approx(6)
    for zero in range(4):  # one replica
        assert moved(x=8, dp=1, zero=zero) == pytest.approx(6 + 15 * 10)
    assert moved(bits=32) == pytest.approx(0 + 12)


def test_the_interval_of_young_loses_the_least_time() -> None:
    writing, mtbf = 60.0, 50_000.0
    best = checkpoint_interval(writing, mtbf)

    def lost(interval: float) -> float:
        return writing / interval + interval / 2 / mtbf

    assert lost(best) < min(lost(0.9 * best), lost(1.1 * best))


def test_costs_of_a_training_run() -> None:
    told = costs(1e12, 1e6, 1024, 840e9, load_machine("dgx-h100"))
    assert told.mtbf_hours == pytest.approx(50700 / 1024)
    assert 0.98 < told.goodput < 1
    assert told.days == pytest.approx(1e6 / 86400 / told.goodput)
    assert told.gpu_hours == pytest.approx(told.days * 24 * 1024)
    assert told.kwh == pytest.approx(told.gpu_hours * 0.7)
    assert told.price is None


def attention_rate(machine: str, seq: int, **changes: object) -> float:
    """Return the FLOP/s of the fused causal kernel, forward and backward, with 64 heads and a head_dim of 128."""
    work = workload_of_model(ModelConfig(**PRESETS["llama3-70b"])).but(seq_length=seq, global_batch_size=64, **changes)
    constants = replace(PRIOR, attention=1.0)
    block = block_time(work, load_machine(machine), constants)
    return float(4 * seq**2 * work.model.queries / 2 / block.attention_forward)


@pytest.mark.parametrize(
    ("machine", "flash2", "measured"),
    [
        ("dgx-a100", True, {2048: 150, 4096: 177, 8192: 184, 32768: 185}),
        ("dgx-h100", True, {4096: 264, 8192: 290, 16384: 311, 65536: 328}),
        ("dgx-h100", False, {4096: 496, 8192: 524, 16384: 542, 32768: 536, 65536: 520}),
        ("b200", True, {4096: 290, 8192: 338, 16384: 358, 131072: 371}),
        ("b200", False, {4096: 948, 8192: 1180, 16384: 1250, 32768: 1246}),
        ("gb300", False, {4096: 1138, 8192: 1372, 16384: 1479, 32768: 1518}),
    ],
)
def test_attention_kernels_of_each_generation(machine: str, flash2: bool, measured: dict[int, float]) -> None:
    """The TFLOP/s were measured for FlashAttention-2 and for cuDNN (the mean of two versions) in the benchmark of
    NVIDIA/cudnn-frontend."""
    found = [attention_rate(machine, seq, flash2=flash2) / 1e12 for seq in measured]
    assert found == pytest.approx(list(measured.values()), rel=0.1)


def test_rings_of_wide_heads_and_windows_have_an_older_kernel() -> None:
    """Rings of wide heads, and windows without a ring, cannot use cuDNN's kernel. For an A100, there is no newer
    kernel than FlashAttention-2."""

    def share(machine: str, **changes: object) -> float:
        work = workload_of_model(ModelConfig(**PRESETS["llama3-70b"])).but(
            **{"seq_length": 32768, "global_batch_size": 64} | changes
        )
        return float(kernel_of(work, load_machine(machine)).share)

    ring, ulysses = ({"cp": 8, "cp_method": CP_METHODS.index(name)} for name in ("ring", "ulysses"))
    window = {"sliding": 1.0, "sliding_window": 4096}
    older = [ring | {"head_dim": 256}, window]
    newer = [ring, ulysses, ulysses | {"head_dim": 256}, ring | window, window | {"seq_length": 4096}]
    assert all(share("b200", **each) < 0.5 for each in older)
    assert all(share("b200", **each) == 1 for each in newer)
    assert all(share("dgx-a100", **each) == 1 for each in older + newer)


@pytest.mark.parametrize("window", [16, 32, 48, 100, 200, 256])
@pytest.mark.parametrize("cp", [2, 4, 8])
def test_a_ring_with_a_window_computes_the_keys_of_its_blocks(cp: int, window: int) -> None:
    tokens = 256 // cp
    of_ranks = []
    for rank in range(cp):
        axis = SimpleNamespace(rank=rank, size=cp)
        steps = (block_of_step(source, tokens, None, axis, window, torch.device("meta")) for source in range(cp))
        blocks = [block for block in steps if block is not None]
        scores = [len(range(tokens)[block.queries]) * len(range(tokens)[block.keys]) for block in blocks]
        of_ranks.append(sum(scores) / tokens)
    work = workload_of_model(ModelConfig(**PRESETS["gpt2"], sliding_window=window))
    found = keys_computed(work.but(cp=cp, cp_method=CP_METHODS.index("ring"), seq_length=256))
    # A causal kernel computes the rank's own block.
    if window == 256:
        assert found == 128
    else:
        assert found == pytest.approx(max(of_ranks), rel=0.26)


def test_queries_that_y_shares_meet_all_keys() -> None:
    work = workload_of_model(ModelConfig(**PRESETS["gpt2"])).but(seq_length=256)
    assert keys_computed(work.but(y=2)) == 128
    assert keys_computed(work.but(y=8)) == 256


def test_terms_take_arrays() -> None:
    sizes = np.array([1.0, 2.0, 8.0, 64.0])
    assert gather_seconds(1e6, 1, group_of(sizes, 1.0, A100, PRIOR)).shape == (4,)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_is_charged_to_the_axis_that_sends(zero: int) -> None:
    """If z has one rank, the planner counts all communication of weights and gradients under dp. If z has several
    ranks, the part under z is the same as without dp."""
    work = workload_of_model(ModelConfig(**PRESETS["llama3-8b"])).but(
        seq_length=8192, global_batch_size=64, zero=zero, overlap_z=False
    )
    machine = load_machine("dgx-h100")
    parts = step_parts(work.but(dp=16), machine, PRIOR)
    assert parts["z"] == 0 and parts["dp"] > 0
    both, alone = (step_parts(work.but(z=4, dp=dp, global_batch_size=4 * dp), machine, PRIOR) for dp in (4, 1))
    assert both["z"] == pytest.approx(alone["z"]) and both["z"] > 0 and both["dp"] > alone["dp"]
