"""Train the small Llama of the comparison with fourfold, first on short contexts and then on longer ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.sparse_attention.start import write_start
from benchmarks.sparse_attention.tasks import ASK, END, EQUALS, START, VOCABULARY, training_document
from fourfold.data.dataset import Windows
from fourfold.data.indexed import IndexedWriter
from fourfold.errors import UserError
from fourfold.huggingface.export_model import export_huggingface
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run

RUN_FILE = Path(__file__).parent / "model.toml"
CALIBRATION_SEED, CALIBRATION_DOCUMENTS = 999, 24


@dataclass(frozen=True)
class Stage:
    """A training run on documents of one length."""

    length: int
    steps: int
    batch: int
    """Number of documents in a step."""
    lr: float
    documents: int
    """Number of documents in the corpus."""


STAGES = (
    Stage(128, 5000, 8, 3e-3, 40000),
    Stage(512, 600, 4, 1.5e-3, 2400),
    Stage(2048, 1500, 2, 2e-3, 3000),
    Stage(8192, 150, 1, 1e-3, 150),
    Stage(16384, 250, 1, 7e-4, 250),
)

WARMUP = 50


def trained_model(folder: Path) -> Path:
    """Train the model, unless an earlier call has trained it. Return the folder with the model in the Hugging Face
    format.

    Args:
        folder: Folder of the corpora, the runs, and the model.

    Raises:
        UserError: A signal stopped a run. If you call the function again, it continues from the run's checkpoint.
    """
    model = folder / "model"
    if (model / "config.json").is_file():
        return model
    start = folder / "start"
    if not (start / "config.json").is_file():
        write_start(start)
    for number, stage in enumerate(STAGES):
        exported = model if stage == STAGES[-1] else folder / f"stage-{number}"
        if not (exported / "config.json").is_file():
            _train(stage, number, folder, start)
            export_huggingface(folder / f"stage-{number}-run", exported)
        start = exported
    return model


def _train(stage: Stage, number: int, folder: Path, start: Path) -> None:
    """Train one stage, starting from a model in the Hugging Face format."""
    corpus = folder / f"stage-{number}-corpus"
    if not corpus.with_suffix(".idx").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(corpus, stage.length, stage.documents, seed=100 + number)
    overrides = [
        f"name=stage-{number}-run",
        f"output_dir={folder}",
        f"training.seq_length={stage.length}",
        f"training.train_steps={stage.steps}",
        f"training.global_batch_size={stage.batch}",
        f"training.micro_batch_size={stage.batch}",
        f"optimizer.lr={stage.lr}",
        f"lr_scheduler.warmup_steps={min(WARMUP, stage.steps // 3)}",
        f'data.train=[{{path="{corpus}"}}]',
        f"model.from_hf={start}",
    ]
    if run_on_grid("fourfold.training.trainer:train", [load_run(RUN_FILE, overrides)], 1).stopped:
        raise UserError(f"the run in {folder} was stopped; the same command continues from its checkpoint")


def write_corpus(prefix: Path, length: int, documents: int, seed: int) -> None:
    """Write a corpus of documents that all have the same length. In a run with this sequence length, each sample is one
    document.

    Args:
        prefix: Path of the corpus, without a file extension.
        length: Number of tokens of a document.
        documents: Number of documents.
        seed: Seed of the documents.
    """
    rng = np.random.default_rng(seed)
    with IndexedWriter(prefix, VOCABULARY) as writer:
        for _ in range(documents):
            writer.add_document(training_document(length, rng))


def answers(windows: Windows) -> NDArray[np.bool_]:
    """A loss mask that keeps only answers. A token is an answer if the last marker before it (START, ASK, EQUALS, or
    END) is EQUALS.

    Args:
        windows: Samples of documents from ``tasks.training_document``.
    """
    tokens = windows.tokens
    is_marker = np.isin(tokens, (START, ASK, EQUALS, END))
    last = np.maximum.accumulate(np.where(is_marker, np.arange(tokens.shape[1]), 0), axis=1)
    kept: NDArray[np.bool_] = (np.take_along_axis(tokens, last, 1)[:, :-1] == EQUALS) & ~is_marker[:, 1:]
    return kept


def calibration_windows(length: int) -> list[list[int]]:
    """Return documents for the calibration of Loki. They are made like the training documents, but with another seed.

    Args:
        length: Number of tokens of a document.
    """
    rng = np.random.default_rng(CALIBRATION_SEED)
    return [training_document(length, rng).tolist() for _ in range(CALIBRATION_DOCUMENTS)]
