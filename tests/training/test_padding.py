"""Training does not depend on the amount of padding. This holds for dense models and experts, for conversations and
pairs, and on every axis."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from pool import Pool
from tiny_chat import write_rows
from tiny_runs import DEEPSEEK, GEMMA2, GPT, LLAMA, QWEN_MOE, tiny_run
from torch import Tensor

from fourfold.config.run import RunConfig
from fourfold.data.conversations import PreferencePairs
from fourfold.data.dataset import SourceMixture
from fourfold.data.loader import Loader
from fourfold.data.masks import answers_only, document_boundary
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.run_data import build_dataset
from fourfold.errors import UserError
from fourfold.parallel.grid.grid import Grid
from fourfold.training.corpora import micro_batches, open_corpora
from fourfold.training.job import Job
from fourfold.training.reference_model import reference_log_probabilities

Kind = Literal["sft", "preferences"]

STEPS = 3
LENGTHS: dict[Kind, tuple[int, int]] = {"sft": (40, 48), "preferences": (24, 56)}
"""Two sequence lengths per kind of data. With both lengths, the same conversations are packed into each sequence."""

SHORT = DEEPSEEK | {"num_hidden_layers": 2}
LOSSES = {"load_balancing_loss": 0.5, "z_loss": 0.1}
BIAS = {**LOSSES, "bias_update_rate": 0.02}
CAPACITY = {**LOSSES, "capacity_factor": 0.75}
FULL = {"activation_checkpoint": {"mode": "full"}}
ADAPTERS = {"lora": {"rank": 4, "targets": ["q_proj", "o_proj"]}}
MUON = {"optimizer": {"name": "muon"}}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, str]:
    """Make a corpus of conversations and a corpus of pairs. The conversations have 18 to 20 tokens (two fit into a
    sequence) or 32 to 40 tokens, and the answers of the pairs have 8 to 24 tokens."""
    folder = tmp_path_factory.mktemp("padded")
    lengths = [(18 + n % 3) if n % 4 else (32 + n % 9) for n in range(60)]
    talks = [
        {"prompt": f"{n:02}" + "?" * (n % 5), "completion": "x" * (length - 3 - n % 5 - n % 2) + "y" * (n % 2)}
        for n, length in enumerate(lengths)
    ]
    pairs = [{"prompt": f"{n:02}", "chosen": "yes" * (2 + n % 6), "rejected": "no" * (3 + n % 8)} for n in range(20)]
    made: dict[Kind, str] = {}
    for kind, rows in (("sft", talks), ("preferences", pairs)):
        path = write_rows(folder / f"{kind}.jsonl", rows)
        prepare_conversations([path], folder / kind, tokenizer="bytes", format=kind)
        made[kind] = str(folder / kind)
    return made


def run_of(
    corpora: dict[Kind, str], kind: Kind, model: dict[str, Any], grid: dict[str, Any], seq_length: int, **sections: Any
) -> RunConfig:
    data = {"format": kind, "train": [{"path": corpora[kind]}]}
    if kind == "preferences":
        sections["dpo"] = {"beta": 0.3}
    training = {"seq_length": seq_length, **sections.pop("training", {})}
    optimizer = {"lr": 1e-3, "eps": 1e-3, **sections.pop("optimizer", {})}
    return tiny_run(model, grid, data=data, optimizer=optimizer, training=training, **sections)


def steps_body(rank: int, world_size: int, run: RunConfig) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Return the figures of three steps, and this rank's weights after them."""
    grid = Grid(run.parallel, "cpu")
    corpora = open_corpora(run, grid.batch)
    job = Job(run, grid, torch.device("cpu"))
    job.initialize(0)
    for pairs in corpora.pairs():
        pairs.reference = reference_log_probabilities(job, pairs, corpora.train.masks)
    records = []
    for step in range(STEPS):
        batches = micro_batches(corpora.train.step(step), run, grid.cp, job.device)
        validated = job.evaluate(batches).item()
        result = job.train_step(batches, step)
        record: dict[str, Any] = {"validated": validated, "loss": result.loss.item(), "norm": result.grad_norm.item()}
        if job.expert_load is not None:
            record |= job.expert_load.figures() | {"rows": job.expert_load.rows()}
        records.append(record)
    corpora.close()
    return records, {shard.name: shard.local.clone() for shard in job.shards}


def check(
    pool: Pool,
    corpora: dict[Kind, str],
    kind: Kind,
    model: dict[str, Any],
    grid: dict[str, Any],
    sections: dict[str, Any],
) -> None:
    runs = [run_of(corpora, kind, model, grid, length, **sections) for length in LENGTHS[kind]]
    for short, long in zip(*(pool.run(run.parallel.world_size, steps_body, run) for run in runs), strict=True):
        for step, (one, other) in enumerate(zip(short[0], long[0], strict=True)):
            assert one.pop("rows", None) == other.pop("rows", None)
            assert one == pytest.approx(other, rel=1e-5), step
            assert (one.get("dropped_share", 0) > 0) == bool(runs[0].moe.capacity_factor)
        for name, weight in short[1].items():
            torch.testing.assert_close(weight, long[1][name], rtol=1e-4, atol=1e-6, msg=name)


CASES: dict[str, tuple[Kind, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "conversations": ("sft", SHORT, {}, {"moe": BIAS}),
    "conversations x2 cp2 ep2": ("sft", SHORT, {"x": 2, "cp": 2, "ep": 2}, {"moe": CAPACITY} | FULL),
    "pairs pp2 z2 ep2": ("preferences", SHORT, {"pp": 2, "z": 2, "ep": 2}, {"moe": BIAS}),
    "dense conversations z2": ("sft", LLAMA, {"z": 2}, {}),
}
GRIDS: list[dict[str, Any]] = [
    {"x": 2},
    {"y": 2},
    {"z": 2, "ep": 2},
    {"dp": 2, "ep": 2},
    {"cp": 2, "ep": 2},
    {"cp": 2, "cp_method": "ring"},
    {"pp": 2},
    {"dp": 2, "zero": 3},
    {"x": 2, "y": 2, "z": 2, "ep": 2},
    {"pp": 2, "x": 2, "cp": 2, "schedule": "Interleaved1F1B"},
    {"pp": 2, "dp": 2, "ep": 2, "schedule": "ZBVZeroBubble"},
]
SECTIONS: list[dict[str, Any]] = [
    {},
    FULL,
    {"training": {"micro_batch_size": 4}},
    {"overlap": {"batch_parts": 2}},
]
DEEP = {"num_hidden_layers": 4}
SLOW_CASES = {
    f"{kind} {name} {' '.join(f'{k}{v}' for k, v in grid.items())} {section}": (kind, model | DEEP, grid, more)
    for kind in LENGTHS
    for name, model, moe in (
        ("dense", LLAMA, {}),
        ("bias", DEEPSEEK, {"moe": BIAS}),
        ("capacity", QWEN_MOE, {"moe": CAPACITY}),
    )
    if kind == "sft" or name != "capacity"
    for number, grid in enumerate(GRIDS)
    for section in [SECTIONS[number % 3 if name != "dense" else 3 * (number % 2)]]
    if not (name == "dense" and "ep" in grid)
    for more in [{**moe, **section}]
} | {
    "conversations with adapters x2": ("sft", LLAMA, {"x": 2}, ADAPTERS),
    "pairs with adapters pp2 z2 ep2": ("preferences", SHORT, {"pp": 2, "z": 2, "ep": 2}, {**ADAPTERS, "moe": LOSSES}),
    "conversations muon z2 ep2": ("sft", SHORT, {"z": 2, "ep": 2}, {**MUON, "moe": BIAS}),
    "pairs muon pp2 cp2": ("preferences", SHORT, {"pp": 2, "cp": 2}, {**MUON, "moe": BIAS}),
    "conversations goldfish cp2": ("sft", SHORT, {"cp": 2}, {"masks": {"goldfish": {"strategy": "hash"}}, "moe": BIAS}),
    "conversations sliding cp2 ring": ("sft", GEMMA2, {"cp": 2, "cp_method": "ring"}, {}),
    "pairs learned positions pp2": ("preferences", GPT, {"pp": 2}, {}),
    "conversations bias and capacity cp2 y2": (
        "sft",
        QWEN_MOE | {"router_bias": True},
        {"cp": 2, "y": 2},
        {"moe": CAPACITY | {"bias_update_rate": 0.02}},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_training_does_not_depend_on_padding(name: str, pool: Pool, corpora: dict[Kind, str]) -> None:
    check(pool, corpora, *CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_CASES)
def test_training_does_not_depend_on_padding_on_any_axis(name: str, pool: Pool, corpora: dict[Kind, str]) -> None:
    check(pool, corpora, *SLOW_CASES[name])


def data_tokens(corpus: str, kind: Kind, seq_length: int, samples: int) -> int:
    """Return how many tokens of the first samples belong to a conversation or a pair, counted in the corpus."""
    dataset = build_dataset([(corpus, 1.0)], seq_length, 0)
    windows = dataset.read(np.arange(samples))
    if kind == "preferences":
        (pairs,) = dataset.sources if isinstance(dataset, SourceMixture) else [dataset]
        assert isinstance(pairs, PreferencePairs)
        return int(np.diff(pairs.corpus.document_offsets)[pairs.documents_of(np.arange(samples))].sum())
    # In each row, padding is the last document.
    return sum(int((row != row[-1]).sum()) for row in windows.documents)


@pytest.mark.parametrize("kind", LENGTHS)
def test_prompts_and_ends_of_documents_are_data(kind: Kind, corpora: dict[Kind, str]) -> None:
    seq_length = LENGTHS[kind][1]
    loader = Loader(
        build_dataset([(corpora[kind], 1.0)], seq_length, 0), seq_length, 8, 8, masks=(document_boundary, answers_only)
    )
    (batch,) = loader.step(0)
    assert batch.is_data is not None and batch.is_data.sum() == data_tokens(corpora[kind], kind, seq_length, 8)
    assert not batch.is_data[:, -1].any(), "every sequence ends with padding"
    assert (batch.is_data & (batch.labels < 0)).any(), "data has tokens without labels"
    assert (batch.tokens[~batch.is_data] == 256).all() and (batch.tokens[batch.is_data] == 256).any()


def test_experts_count_the_data_alone(pool: Pool, corpora: dict[Kind, str]) -> None:
    """Experts get only rows of real tokens, and means cover only real tokens. A router with even scores shows this."""
    run = run_of(corpora, "sft", SHORT, {}, 48, moe=BIAS)
    records, _ = pool.run(1, steps_body, run)[0]
    rows = records[0]["rows"]
    assert [sum(layer) for layer in rows] == [0, 2 * data_tokens(corpora["sft"], "sft", 48, 8)]
    assert records[0]["router_entropy"] == pytest.approx(np.log(8), rel=0.01)
    assert records[0]["balance_loss"] == pytest.approx(1, rel=1e-6)


def test_a_reference_has_no_capacity(corpora: dict[Kind, str]) -> None:
    with pytest.raises(UserError, match=r"moe.capacity_factor = 1.0 drops tokens in training, but dpo compares"):
        run_of(corpora, "preferences", SHORT, {}, 24, moe={"capacity_factor": 1.0})
