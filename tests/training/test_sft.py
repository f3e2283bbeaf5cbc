"""Fine-tuning on conversations: the loss does not depend on the grid, on micro-batches, or on how conversations share
sequences."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import Cli
from pool import Pool
from tiny_chat import CHATML, make_chat_tokenizer, talks, write_rows
from tiny_runs import LLAMA, tiny_run

from fourfold.config.run import RunConfig
from fourfold.data.loader import Loader
from fourfold.data.masks import answers_only, document_boundary
from fourfold.data.prepare_conversations import prepare_conversations
from fourfold.data.run_data import build_dataset
from fourfold.errors import UserError
from fourfold.models.causal_attention import documents_of
from fourfold.models.initialize import initialize
from fourfold.models.transformer import IGNORE_INDEX, Transformer
from fourfold.parallel.grid.grid import Grid
from fourfold.training.corpora import micro_batches, open_corpora
from fourfold.training.job import Job

MASKS = (document_boundary, answers_only)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a corpus of bytes. Its prompts and completions have very different lengths, so that sequences have unequal
    numbers of trained tokens."""
    folder = tmp_path_factory.mktemp("talks")
    rows = [
        {"prompt": f"{i}" * (1 + 5 * i % 13), "completion": chr(65 + i % 26) * (1 + (7 * i % 17) * (i % 3))}
        for i in range(60)
    ]
    prepare_conversations([write_rows(folder / "rows.jsonl", rows)], folder / "c", tokenizer="bytes")
    return str(folder / "c")


def run_of(corpus: str, grid: dict[str, int], micro_batch_size: int) -> RunConfig:
    data = {"format": "sft", "train": [{"path": corpus}]}
    return tiny_run(LLAMA, grid, data=data, training={"micro_batch_size": micro_batch_size})


def step_body(rank: int, world_size: int, run: RunConfig) -> tuple[float, float, float]:
    grid = Grid(run.parallel, "cpu")
    corpora = open_corpora(run, grid.batch)
    job = Job(run, grid, torch.device("cpu"))
    job.initialize(0)
    result = job.train_step(micro_batches(corpora.train.step(0), run, job.grid.cp, job.device), 0)
    corpora.train.close()
    return result.loss.item(), result.grad_norm.item(), result.kept_tokens.item()


def test_loss_does_not_depend_on_grid_and_micro_batches(pool: Pool, corpus: str) -> None:
    expected = pool.run(1, step_body, run_of(corpus, {}, 8))[0]
    batch = Loader(build_dataset([(corpus, 1.0)], 32, 0), 32, 8, 8, masks=MASKS).step(0)[0]
    kept = (batch.labels != IGNORE_INDEX).sum(1)
    assert kept.max() >= 2 * kept.min(), "uneven masks"
    for grid, micro_batch in (
        ({}, 1),
        ({}, 4),
        ({"x": 2, "y": 2, "z": 2}, 2),
        ({"z": 2, "dp": 2, "zero": 3}, 1),
        ({"x": 2, "cp": 2}, 4),
        ({"pp": 2, "dp": 2}, 1),
    ):
        run = run_of(corpus, grid, micro_batch)
        for got in pool.run(run.parallel.world_size, step_body, run):
            assert got[2] == expected[2]
            assert got[:2] == pytest.approx(expected[:2], rel=2e-5), (grid, micro_batch)


def test_a_packed_conversation_has_the_loss_that_it_has_alone(corpus: str) -> None:
    run = run_of(corpus, {}, 8)
    model = Transformer(run.model)
    initialize(model, run.model, 0)
    batch = Loader(build_dataset([(corpus, 1.0)], 32, 0), 32, 8, 8, masks=MASKS).step(0)[0]
    tensors = (torch.from_numpy(a) for a in (batch.tokens, batch.labels, batch.positions, batch.document_ends))
    tokens, labels, positions, ends = tensors
    documents = documents_of(ends, 32)
    compared = 0
    with torch.no_grad():
        for row in range(len(tokens)):
            for document in documents[row].unique():
                mine = torch.where(documents[row] == document, labels[row], IGNORE_INDEX)
                if (mine == IGNORE_INDEX).all():
                    continue
                packed = model(tokens[row][None], mine[None], positions[row][None], ends[row][None])
                here = documents[row] == document
                alone = model(tokens[row][here][None], labels[row][here][None])
                assert packed.item() == pytest.approx(alone.item(), rel=1e-5)
                compared += 1
    assert compared >= 12


def test_a_run_file_fine_tunes_on_a_template_and_shows_what_it_trains(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = make_chat_tokenizer(tmp_path / "tokenizer", CHATML)
    rows = write_rows(tmp_path / "rows.jsonl", talks(40))
    code, out, err = cli("prepare", rows, "--out", tmp_path / "c", "--format", "sft", "--tokenizer", folder)
    assert code == 0 and "40 documents" in out and "of them trained" in out, err
    run_file = tmp_path / "tune.toml"
    run_file.write_text(
        f"""
        output_dir = "{tmp_path}"
        [model]
        preset = "llama-tiny"
        vocab_size = 310
        [data]
        format = "sft"
        train = [{{ path = "{tmp_path / "c"}" }}]
        [training]
        global_batch_size = 4
        micro_batch_size = 2
        seq_length = 128
        train_steps = 2
        """
    )
    code, out, err = cli("audit", "masks", run_file, "--tokens", 2000)
    assert code == 0 and "trained" in out and "say 14" in out, err
    code, out, err = cli("train", run_file)
    assert code == 0 and "conversations" in out + err and "of the tokens trained" in out + err, err
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0.05 < line["trained_token_share"] < 0.9 for line in metrics)


@pytest.mark.parametrize("format", ["text", "sft"])
def test_a_corpus_that_is_missing_is_called_missing_whatever_its_format(format: str) -> None:
    run = tiny_run(LLAMA, {}, data={"format": format, "train": [{"path": "corpora/nothere"}]})
    with pytest.raises(UserError, match=r"corpora/nothere\.idx does not exist in .*; `fourfold prepare INPUTS --out"):
        open_corpora(run, type("Axis", (), {"rank": 0, "size": 1}))


def test_conversations_are_not_read_as_text(corpus: str) -> None:
    run = tiny_run(LLAMA, {}, data={"train": [{"path": corpus}]})
    grid = type("Axis", (), {"rank": 0, "size": 1})
    with pytest.raises(UserError, match=r"has the format 'sft', but data\.format = 'text'"):
        open_corpora(run, grid)
    with pytest.raises(UserError, match="see each other"):
        tiny_run(LLAMA, {}, data={"format": "sft", "mask_documents": False, "train": [{"path": corpus}]})


def test_goldfish_and_answers_are_both_heeded(corpus: str) -> None:
    from fourfold.config.loss_masks import GoldfishConfig
    from fourfold.data.goldfish import build_goldfish_mask

    goldfish = build_goldfish_mask(GoldfishConfig(strategy="hash", h=3), [], 32, 8)
    dataset = build_dataset([(corpus, 1.0)], 32, 0, goldfish.look_back)
    windows = dataset.read(np.arange(8))
    both = Loader(dataset, 32, 8, 8, masks=(*MASKS, goldfish)).step(0)[0].labels != IGNORE_INDEX
    answers = answers_only(windows) & document_boundary(windows)
    assert 0 < both.sum() < answers.sum() and not (both & ~answers).any()
