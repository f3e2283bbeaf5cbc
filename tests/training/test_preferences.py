"""Preference optimization: its data, its reference, and a whole run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import Cli
from pool import Pool
from tiny_chat import CHATML, TALK, make_chat_tokenizer, write_rows
from tiny_runs import LLAMA, tiny_run

from fourfold.config.run import RunConfig
from fourfold.data.conversations import PreferencePairs
from fourfold.data.dataset import Windows
from fourfold.data.loader import Loader
from fourfold.data.masks import answers_only, document_boundary
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.transformers_tokenizer import open_tokenizer
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid
from fourfold.models.initialize import initialize
from fourfold.models.transformer import IGNORE_INDEX, Transformer
from fourfold.parallel.grid.grid import Grid
from fourfold.planning.run_workload import workload_of
from fourfold.training import trainer
from fourfold.training.corpora import open_corpora
from fourfold.training.job import Job
from fourfold.training.metrics import read_metrics
from fourfold.training.reference_model import REFERENCE_FILE, reference_log_probabilities

MASKS = (document_boundary, answers_only)
ROWS = [
    {"prompt": f"{i} is ", "chosen": "even" if i % 2 == 0 else "odd", "rejected": "odd" if i % 2 == 0 else "even, no"}
    for i in range(10, 21)
]
"""Eleven pairs, a number that is not divisible by the global batch of four pairs."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("pairs")
    rows = write_rows(folder / "rows.jsonl", ROWS)
    prepare_conversations([rows], folder / "c", tokenizer="bytes", format="preferences")
    return str(folder / "c")


def run_of(corpus: str, folder: Path, grid: dict[str, int] | None = None, **sections: Any) -> RunConfig:
    data = {"format": "preferences", "train": [{"path": corpus}], "validation": [{"path": corpus}]}
    training = {"train_steps": 6, "device": "cpu", **sections.pop("training", {})}
    optimizer = {"lr": 3e-3}
    return tiny_run(
        LLAMA, grid, data=data, dpo={"beta": 0.5}, optimizer=optimizer, training=training, output_dir=str(folder),
        **sections,
    )  # fmt: skip


def train(run: RunConfig) -> list[dict[str, Any]]:
    run_on_grid("fourfold.training.trainer:train", [run], run.parallel.world_size, "cpu")
    return read_metrics(Path(run.output_dir, run.name, "metrics.jsonl"))


def test_a_pair_is_the_same_prompt_twice(corpus: str) -> None:
    pairs = PreferencePairs(corpus, 32, 0)
    assert len(pairs) == 22 and (pairs.cut, pairs.left_out) == (0, 0)
    windows = pairs.read(np.arange(44))
    seen = []
    for chosen, rejected in zip(windows.tokens[0::2], windows.tokens[1::2], strict=True):
        texts = [bytes(t for t in row.tolist() if t < 256).decode() for row in (chosen, rejected)]
        row = next(row for row in ROWS if texts[0].startswith(row["prompt"]))
        assert texts == [row["prompt"] + row["chosen"], row["prompt"] + row["rejected"]]
        seen.append(row["prompt"])
    assert sorted(seen[:11]) == sorted(seen[11:]) == sorted(row["prompt"] for row in ROWS)
    assert seen[:11] != seen[11:], "each epoch has an order of its own"
    (batch,) = Loader(pairs, 32, 4, 4, masks=MASKS).step(0)
    trained = [bytes(t for t in row if 0 <= t < 256).decode() for row in batch.labels.tolist()]
    assert all(text in ("even", "odd", "even, no") for text in trained), "neither prompts nor padding"


def test_pairs_that_do_not_fit(corpus: str) -> None:
    pairs = PreferencePairs(corpus, 10, 0)
    assert pairs.left_out == 0 and pairs.cut == 5
    with pytest.raises(UserError, match=r"no pair of .* has both answers within training.seq_length = 4"):
        PreferencePairs(corpus, 4, 0)


def by_hand(run: RunConfig, pairs: PreferencePairs) -> np.ndarray:
    """Return the log-probability of every document under the initial model, in plain PyTorch."""
    model = Transformer(run.model)
    initialize(model, run.model, run.training.seed)
    (batch,) = Loader(pairs, 32, 22, 22, masks=MASKS).step(0)
    tokens, labels = torch.from_numpy(batch.tokens), torch.from_numpy(batch.labels)
    with torch.no_grad():
        log_probs = model(tokens).double().log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    found = np.empty(22)
    found[pairs.documents_of(np.arange(22))] = (log_probs * (labels != IGNORE_INDEX)).sum(1).numpy()
    return found


def reference_body(rank: int, world_size: int, run: RunConfig) -> np.ndarray:
    grid = Grid(run.parallel, "cpu")
    corpora = open_corpora(run, grid.batch)
    job = Job(run, grid, torch.device("cpu"))
    job.initialize(run.training.seed)
    return reference_log_probabilities(job, corpora.pairs()[0], corpora.train.masks)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("grid", [{}, {"x": 2, "y": 2}, {"pp": 2, "z": 2}, {"cp": 2}], ids=str)
def test_the_reference_is_the_initial_model(pool: Pool, corpus: str, tmp_path: Path, grid: dict[str, int]) -> None:
    run = run_of(corpus, tmp_path, grid)
    expected = by_hand(run, PreferencePairs(corpus, 32, 0))
    for found in pool.run(run.parallel.world_size, reference_body, run):
        assert np.allclose(found, expected, rtol=1e-5)


def test_a_run_learns_the_preferences(corpus: str, tmp_path: Path) -> None:
    steps = {"train_steps": 30}
    records = train(run_of(corpus, tmp_path, training=steps, validation={"interval": 30, "steps": 2}))
    first, last = records[0], records[-1]
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5), "the model is its own reference"
    assert abs(first["dpo_margin"]) < 1e-4 and first["trained_token_share"] == 1
    assert last["loss"] < 0.3 and last["dpo_accuracy"] == 1 and last["dpo_margin"] > 1
    assert last["validation_dpo_accuracy"] == 1 and last["validation_loss"] < 0.3
    assert {"dpo_chosen_reward", "validation_dpo_margin"} <= last.keys()


def test_a_resumed_run_keeps_its_reference(corpus: str, tmp_path: Path) -> None:
    half = run_of(corpus, tmp_path / "halves", training={"train_steps": 3}, lr_scheduler={"decay_style": "constant"})
    whole = run_of(corpus, tmp_path / "whole", lr_scheduler={"decay_style": "constant"})
    train(half)
    reference = tmp_path / "halves" / "run" / REFERENCE_FILE
    before = json.loads(reference.read_text())
    resumed = train(half.model_copy(update={"training": whole.training}))
    assert [r["loss"] for r in resumed] == [r["loss"] for r in train(whole)]
    assert json.loads(reference.read_text()) == before

    reference.unlink()
    longer = half.model_copy(update={"training": whole.training.model_copy(update={"train_steps": 8})})
    with pytest.raises(UserError, match=r"reference.json is missing, but a resumed run needs the log-probabilities"):
        train(longer)
    reference.write_text(json.dumps({corpus: [0.0]}))
    with pytest.raises(UserError, match="has no log-probabilities of the 22 answers"):
        train(longer)


def test_a_resumed_run_keeps_a_reference_that_left_pairs_out(tmp_path: Path) -> None:
    long = {"prompt": "a prompt without any room for its answer", "chosen": "yes", "rejected": "no"}
    prepare_conversations(
        [write_rows(tmp_path / "rows.jsonl", [*ROWS, long])], tmp_path / "c", tokenizer="bytes", format="preferences"
    )
    run = run_of(str(tmp_path / "c"), tmp_path, training={"train_steps": 1})
    train(run)
    longer = run.model_copy(update={"training": run.training.model_copy(update={"train_steps": 2})})
    assert len(train(longer)) == 2


def without_v(windows: Windows) -> np.ndarray:
    return windows.tokens[:, 1:] != ord("v")


def test_a_resumed_run_refuses_the_reference_of_other_masks_or_pairs(tmp_path: Path) -> None:
    pairs, corpus = tmp_path / "rows.jsonl", str(tmp_path / "c")
    prepare_conversations([write_rows(pairs, ROWS)], corpus, tokenizer="bytes", format="preferences")
    train(run_of(corpus, tmp_path, training={"train_steps": 1}))
    longer, without_v = {"train_steps": 2}, {"functions": [f"{__name__}:without_v"]}
    with pytest.raises(UserError, match=r"reference.json was computed for other pairs"):
        train(run_of(corpus, tmp_path, training=longer, masks=without_v))
    last = {**ROWS[-1], "chosen": "odd!"}
    prepare_conversations([write_rows(pairs, [*ROWS[:-1], last])], corpus, tokenizer="bytes", format="preferences")
    with pytest.raises(UserError, match=r"reference.json was computed for other pairs"):
        train(run_of(corpus, tmp_path, training=longer))
    reference = tmp_path / "run" / REFERENCE_FILE
    kept = {key: value for key, value in json.loads(reference.read_text()).items() if not key.startswith("digest")}
    reference.write_text(json.dumps(kept))
    assert len(train(run_of(corpus, tmp_path, training=longer))) == 2, "files of earlier versions have no digest"


def test_chats_become_pairs(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    answers = {name: {"role": "assistant", "content": text} for name, text in (("chosen", "Paris"), ("rejected", "No"))}
    rows = [
        {"prompt": asked, "chosen": [answers["chosen"]], "rejected": [answers["rejected"]]},
        {"chosen": [*asked, answers["chosen"]], "rejected": [*asked, answers["rejected"]]},
    ]
    arguments = ("--out", tmp_path / "c", "--format", "preferences", "--tokenizer", folder)
    code, out, err = cli("prepare", write_rows(tmp_path / "rows.jsonl", rows), *arguments)
    assert code == 0 and "4 documents" in out, err
    windows = PreferencePairs(tmp_path / "c", 64, 0).read([0, 1, 2, 3])
    assert np.array_equal(windows.tokens[:2], windows.tokens[2:]), "both ways to write a row are the same pair"
    assert not np.array_equal(windows.tokens[0], windows.tokens[1])


@pytest.mark.parametrize("has_prompt", [True, False], ids=["prompt of its own", "what both begin with"])
def test_only_the_last_answer_of_a_longer_talk_is_trained(cli: Cli, tmp_path: Path, has_prompt: bool) -> None:
    """The prompt contains earlier answers of the assistant. With sft, these would be trained too."""
    pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    prompt, last = TALK[:3], TALK[3]
    answers = {"chosen": last, "rejected": {**last, "content": "Paris again"}}
    own = prompt if has_prompt else []
    rest = [] if has_prompt else prompt
    row = {"prompt": own or None, **{name: [*rest, answer] for name, answer in answers.items()}}
    arguments = ("--out", tmp_path / "c", "--format", "preferences", "--tokenizer", folder)
    code, _, err = cli("prepare", write_rows(tmp_path / "rows.jsonl", [row]), *arguments)
    assert code == 0, err
    (batch,) = Loader(PreferencePairs(tmp_path / "c", 128, 0), 128, 2, 2, masks=MASKS).step(0)
    tokenizer = open_tokenizer(str(folder))
    trained = [tokenizer.decode([t for t in row if t != IGNORE_INDEX]).strip() for row in batch.labels.tolist()]
    assert trained == [f"{answer['content']}<|im_end|>" for answer in answers.values()]


def unwritable_body(rank: int, world_size: int, run: RunConfig) -> str:
    with pytest.raises(UserError) as raised:
        trainer.train(Place(rank, rank, world_size, world_size, "local"), run)
    return str(raised.value)


def test_a_reference_that_cannot_be_written_ends_every_process(pool: Pool, corpus: str, tmp_path: Path) -> None:
    run = run_of(corpus, tmp_path, {"z": 2})
    train(run.model_copy(update={"training": run.training.model_copy(update={"train_steps": 1})}))
    (tmp_path / "run" / REFERENCE_FILE).unlink()
    (tmp_path / "run" / REFERENCE_FILE).mkdir()
    never = run.model_copy(update={"checkpoint": run.checkpoint.model_copy(update={"resume": "never"})})
    said = pool.run(2, unwritable_body, never)
    assert said[0] == said[1] and REFERENCE_FILE in said[0]


@pytest.mark.parametrize(
    "row", [{"prompt": "a", "chosen": "b"}, {"prompt": "a", "chosen": ["b"], "rejected": "c"}, {"text": "a"}]
)
def test_rows_that_are_no_pairs(cli: Cli, tmp_path: Path, row: dict[str, Any]) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    code, _, errors = cli("prepare", rows, "--out", tmp_path / "c", "--format", "preferences", "--tokenizer", "bytes")
    assert code == 2 and "a row needs prompt, chosen and rejected as texts" in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"training": {"micro_batch_size": 1}}, "micro_batch_size = 1 must be even with dpo"),
        ({"dpo": {}}, "data.format = 'preferences' is for .dpo., but dpo.beta = 0"),
        ({"masks": {"goldfish": {"strategy": "hash"}}}, "compares whole answers, but masks.goldfish.strategy"),
        ({"data": {"source": "python-stdlib", "format": "preferences"}}, "needs one corpus in data.train"),
        ({"metrics": {"machine": "laptop"}}, "which does not predict dpo"),
    ],
)
def test_run_files_that_are_refused(sections: dict[str, Any], message: str) -> None:
    data = {"format": "preferences", "train": [{"path": "nowhere"}]}
    with pytest.raises(UserError, match=message):
        tiny_run(LLAMA, {}, **{"data": data, "dpo": {"beta": 0.1}, **sections})


def test_text_and_pairs_are_not_confused(corpus: str, tmp_path: Path) -> None:
    grid = type("Axis", (), {"rank": 0, "size": 1})
    with pytest.raises(UserError, match=r"has the format 'preferences', but data\.format = 'text'"):
        open_corpora(tiny_run(LLAMA, {}, data={"train": [{"path": corpus}]}), grid)
    with pytest.raises(UserError, match=r"the planner does not predict \[dpo\]"):
        workload_of(run_of(corpus, tmp_path))
