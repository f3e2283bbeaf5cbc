"""While a process loads its shards of a Hugging Face model, it never needs memory for more than these shards."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from pool import Pool

from fourfold.config.model import ModelConfig
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.huggingface.import_model import import_huggingface, load_pretrained
from fourfold.huggingface.weight_names import name_map
from fourfold.models.tensor_files import Entry, write_tensor_files
from fourfold.models.transformer import parameter_shapes
from fourfold.parallel.grid.grid import Grid
from fourfold.run_file.load import make_run
from fourfold.training.job import Job

MODEL = ModelConfig(
    vocab_size=32000, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4
)

MIXTURE = ModelConfig(
    vocab_size=1000, hidden_size=1024, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=4, qk_norm=True,
    intermediate_size=1024, num_experts=32,
)  # fmt: skip
MODELS = {"llama": MODEL, "qwen3_moe": MIXTURE}


def write_model(folder: Path, kind: str) -> None:
    """Write a model of 132 million bf16 parameters, or 208 million with experts. Only its size matters, so it is not
    random."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(MODELS[kind], kind)))
    entries = [
        Entry(t.name, torch.bfloat16, t.shape, partial(torch.ones, t.shape, dtype=torch.bfloat16))
        for t in name_map(kind, MODELS[kind])
    ]
    write_tensor_files(folder, entries, shard_bytes=10**8)


def peak_memory(reset: bool = False) -> int:
    """Return this process's peak memory since the last reset, including pages of mapped files."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def memory_body(rank: int, world_size: int, run: RunConfig) -> tuple[int, int, int]:
    """Return the bytes that loading added at its peak, the bytes of this process's shards, and the bytes of its largest
    shard."""
    job = Job(run, Grid(run.parallel, "cpu"), torch.device("cpu"))
    before = peak_memory(reset=True)
    load_pretrained(job, run.model.from_hf)
    sizes = [shard.local.numel() * shard.local.element_size() for shard in job.shards]
    return peak_memory() - before, sum(sizes), max(sizes)


def needs_linux() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("the peak of memory can only be reset on Linux")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("llama", {"x": 2, "y": 2}),
        ("llama", {"z": 4}),
        ("llama", {"y": 4}),
        ("llama", {"pp": 2, "z": 2}),
        ("qwen3_moe", {"x": 2, "y": 2}),
        ("qwen3_moe", {"z": 4, "ep": 2}),
        ("qwen3_moe", {"pp": 2, "dp": 2, "ep": 2}),
    ],
    ids=str,
)
def test_loading_needs_a_process_its_own_part_and_little_more(
    kind: str, parallel: dict[str, int], pool: Pool, tmp_path: Path
) -> None:
    needs_linux()
    write_model(tmp_path / "hf", kind)
    training = {"global_batch_size": 8, "micro_batch_size": 1, "seq_length": 64, "train_steps": 1}
    table = {"model": {"from_hf": str(tmp_path / "hf")}, "data": {"source": "python-stdlib"}, "parallel": parallel}
    run = make_run({**table, "training": training})
    for added, own, largest in pool.run(4, memory_body, run):
        print(
            f"{parallel}: added {added:,}, own {own:,}, largest {largest:,}: own + {(added - own) / largest:.2f} × it"
        )
        # The allocator may keep freed pages, so allow for some. The whole model would take 4 × own.
        assert added <= own + 3 * largest


def import_body(rank: int, world_size: int, folder: Path, out: Path) -> int:
    """Return the bytes that the second import adds at its peak. The first import also loads libraries."""
    import_huggingface(str(folder), out / "first")
    before = peak_memory(reset=True)
    import_huggingface(str(folder), out / "second")
    return peak_memory() - before


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_an_import_holds_one_tensor(kind: str, pool: Pool, tmp_path: Path) -> None:
    """One tensor means one of our parameters, so all experts of a layer count as one."""
    needs_linux()
    write_model(tmp_path / "hf", kind)
    (added,) = pool.run(1, import_body, tmp_path / "hf", tmp_path / "ours")
    largest = 2 * max(map(math.prod, parameter_shapes(MODELS[kind]).values()))
    print(f"import: {added:,} bytes, the largest tensor {largest:,}, the model {2 * num_parameters(MODELS[kind]):,}")
    assert added < 2 * largest
