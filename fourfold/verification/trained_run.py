"""Train the run with the trainer itself on small random corpora, resume it on another grid, and check what it records.

This tests the parts of the trainer that a single training step does not use: the loader, validation, moving averages,
resuming, and the log-probabilities of the DPO reference model. Parity's reference on one process reads the same corpora
step by step, without a loader and without resuming.
"""

import io
import json
import math
import shutil
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.config.data_section import Corpus, DataConfig
from fourfold.config.during_training import ValidationConfig
from fourfold.config.loss_masks import MasksConfig
from fourfold.config.run import CheckpointConfig, ParallelConfig, RunConfig
from fourfold.data.atomic_files import writing
from fourfold.data.run_data import build_dataset
from fourfold.data.tokenizer import ByteTokenizer
from fourfold.environment import Place
from fourfold.launch.stop_signals import StopRequest
from fourfold.parallel.grid.shared_failure import failing_together
from fourfold.training.corpora import VALIDATION_SEED
from fourfold.training.job import Job
from fourfold.training.loss_scaling import LossScale
from fourfold.training.metrics import METRICS_FILE
from fourfold.training.run_folder import folder_of
from fourfold.training.trainer import prepare
from fourfold.verification.deviation import amplification, deviation
from fourfold.verification.one_process import Reference, learning_rate
from fourfold.verification.parity_report import Deviation
from fourfold.verification.random_corpora import write_corpus
from fourfold.verification.reference_batches import Sequences, batch_of

STEPS, RESUMES_AFTER = 3, 2
OVERFLOWS = 1
"""Index of the step (from 0) whose gradients overflow on purpose. Only some runs have such a step."""

VALIDATION_STEPS = 2

AT_DEFAULTS = ("checks", "fault_tolerance", "loss_scaling", "metrics", "evaluation", "audit", "sample")
"""Sections of the run file that are reset to their defaults for the trained run."""

Record = dict[str, float | None]
"""The metrics that the trainer records for a step, by name. NaN is stored as None."""


def trained_run(run: RunConfig, folder: Path, device: torch.device) -> RunConfig:
    """Return a short version of the run for the trainer: a few steps on the corpora in ``folder``, with a validation
    after each step."""
    train, validation = ([Corpus(path=str(folder / name))] for name in ("train", "validation"))
    is_split, kind = run.data.mask_documents, run.data.format
    exempt = [*run.masks.goldfish.exempt, ByteTokenizer.eod_id]  # The goldfish mask never drops special tokens.
    return run.model_copy(
        update={
            "output_dir": str(folder),
            "model": run.model.model_copy(update={"from_hf": None}),
            "data": DataConfig(format=kind, mask_documents=is_split, train=train, validation=validation),
            "training": run.training.model_copy(update={"train_steps": STEPS, "device": device.type}),
            "masks": MasksConfig(goldfish=run.masks.goldfish.model_copy(update={"exempt": exempt})),
            "checkpoint": CheckpointConfig(interval=RESUMES_AFTER),
            "validation": ValidationConfig(interval=1, steps=VALIDATION_STEPS),
            **{section: RunConfig.model_fields[section].default for section in AT_DEFAULTS},
        }
    )


def train_and_resume(run: RunConfig, other: ParallelConfig, place: Place, overflows: bool) -> tuple[Job, list[Record]]:
    """Train a run in an empty folder, and resume it on another grid. Every process must call this.

    Args:
        run: The run, as ``trained_run`` returned it.
        other: The grid for the steps after ``RESUMES_AFTER``.
        place: The rank of this process, and the size of the job.
        overflows: Whether the gradients of the step ``OVERFLOWS`` are infinite, so that the trainer skips it.

    Returns:
        The job after the last step, and the trainer's record of each step. The list of records is empty on all ranks
        except 0.
    """
    with failing_together(), writing(Path(run.output_dir)):
        if dist.get_rank() == 0:
            # An interrupted run of parity may have left files here.
            shutil.rmtree(run.output_dir, ignore_errors=True)
            Path(run.output_dir).mkdir(parents=True)
            for seed, corpora in enumerate((run.data.train, run.data.validation)):
                write_corpus(Path(corpora[0].path), run, seed)
    for part, until in ((run, RESUMES_AFTER), (run.model_copy(update={"parallel": other}), STEPS)):
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), ExitStack() as stack:
            trainer = prepare(place, part, (), StopRequest(announce=False, launched=False), stack)
            for step in range(trainer.steps, until):
                if overflows and step == OVERFLOWS:
                    trainer.job.loss_scale = LossScale(run.loss_scaling, math.inf)
                taken = trainer.train_step()
                trainer.job.loss_scale = None
                trainer.after_step(taken)
            trainer.checkpointer.wait()
    dist.barrier()
    if dist.get_rank() > 0:
        return trainer.job, []
    lines = (folder_of(run) / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    # If the trainer has skipped steps, records are missing. Append empty records, so that parity reports the missing
    # steps instead of crashing.
    return trainer.job, [*map(json.loads, lines), *[{}] * STEPS]


def compare_records(run: RunConfig, recorded: list[Record], references: list[Reference]) -> list[Deviation]:
    """Take the steps of the run with the references, and compare the references' metrics with the trainer's recorded
    metrics. Only rank 0 calls this.

    Args:
        run: The run that was trained.
        recorded: The trainer's metrics of each step.
        references: The run on one process in float32 and in float64, with its initial weights.
    """
    held_out, *batches = _batches(run, references[0].device)
    noise = 0.0
    if run.dpo.beta:
        of_initial = references[1].log_probabilities
        held_out, *batches = (replace(each, reference_B=of_initial(each)) for each in (held_out, *batches))
        noise = amplification(run) * torch.finfo(torch.float32).eps
    found = []
    for step, batch in enumerate(batches):
        if step == OVERFLOWS and recorded[step].get("skipped"):
            # The references do not take the step that overflows.
            continue
        one, exact = (_figures(reference, step, batch, held_out) for reference in references)
        # In the first step, the model equals the DPO reference, so all margins are zero. Do not compare them, because
        # rounding decides their sign.
        is_undecided = step == 0
        ties = {name.replace("ties", "accuracy"): float(exact.pop(name)) for name in [*exact] if name.endswith("ties")}
        names = [name for name in exact if not (is_undecided and name.endswith(("margin", "reward", "accuracy")))]
        for name in names:
            value = recorded[step].get(name)
            got = torch.tensor(math.nan if value is None else value, dtype=torch.float64)
            each = deviation(f"{name} of step {step + 1}", got, one[name], exact[name], amplification(run))
            found.append(each._replace(one_process=max(each.one_process, noise, ties.get(name, 0.0))))
    return found


def _batches(run: RunConfig, device: torch.device) -> list[Sequences]:
    """Return the validation batch, and then the batch of each step. Their labels come from ``reference_labels``, not
    from the loader."""
    goldfish, training = run.masks.goldfish, run.training
    unmasked = run.model_copy(update={"masks": MasksConfig()})
    look_back = goldfish.h if goldfish.strategy == "hash" else 0
    samples = build_dataset([(run.data.train[0].path, 1.0)], training.seq_length, training.seed, look_back)
    unseen = build_dataset([(run.data.validation[0].path, 1.0)], training.seq_length, VALIDATION_SEED)
    of_steps = [batch_of(samples, run, step, device) for step in range(STEPS)]
    return [batch_of(unseen, unmasked, 0, device, VALIDATION_STEPS), *of_steps]


def _figures(reference: Reference, step: int, batch: Sequences, held_out: Sequences) -> dict[str, Tensor]:
    """Take one step with a reference, validate on ``held_out``, and return the metrics. Their names are the same as in
    the trainer's metrics.jsonl."""
    run = reference.run
    taken = reference.step(step, batch, run.optimizer.max_grad_norm)
    share = torch.ones(()) if run.dpo.beta else batch.kept_BS.double().mean()
    validation = reference.evaluate(held_out)
    found = {"loss": taken.loss, "grad_norm": taken.grad_norm, "trained_token_share": share, **taken.extra_metrics}
    found |= {f"validation_{name}": value for name, value in validation.items()}
    found["lr"] = torch.tensor(learning_rate(step, run), dtype=torch.float64)
    if reference.averages:
        found["ema_validation_loss"] = reference.evaluate(held_out, averaged=True)["loss"]
    return found
