"""Record a run on rank 0: on the console, in metrics.jsonl and other files of the run's folder, and in trackers."""

from __future__ import annotations

import json
import math
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from fourfold import __version__
from fourfold.config.parameter_counts import num_parameters
from fourfold.config.run import RunConfig
from fourfold.data.atomic_files import WriteFailed, write_output
from fourfold.data.manifest import read_manifest
from fourfold.data.mask_preview import MaskStatistics
from fourfold.environment import Place
from fourfold.models.lora import trained_shapes
from fourfold.run_file.dump import to_toml
from fourfold.training.console import Fact, Progress
from fourfold.training.corpora import Corpora
from fourfold.training.flops import FLOP_FORMULA, flops_per_token, mfu, peak_flops
from fourfold.training.job import Job
from fourfold.training.metrics import EXPERTS_FILE, MetricsWriter, StepMetrics, add_record, peak_memory_bytes
from fourfold.training.outcome import Outcome
from fourfold.training.planner_check import PlannerCheck
from fourfold.training.run_folder import RUN_FILE, SAMPLE_FILE, SUMMARY_FILE
from fourfold.training.step_checks import SharedFigures
from fourfold.training.tracking import Tracking, check_trackers

EXPERT_RECORDS = 100
"""Approximate maximum number of steps for which the load of every expert is recorded."""


class RunRecord:
    """Prints and writes everything about one run. Only rank 0 has one."""

    def __init__(
        self, run: RunConfig, run_dir: Path, job: Job, corpora: Corpora, first_step: int, place: Place
    ) -> None:
        """Print the main facts of the run, and open its files and trackers."""
        self.run, self.run_dir, self.job, self.first_step = run, run_dir, job, first_step
        training = run.training
        # This number includes masked tokens.
        self.tokens_per_step = training.global_batch_size * training.seq_length
        self.losses_per_step = training.global_batch_size // 2 if run.dpo.beta else self.tokens_per_step
        """Number of losses that a step averages over if no token is masked: one per token, or in preference training
        one per pair of answers."""
        # With LoRA, the frozen weights have no gradients. This saves a third of the FLOPs of the matmuls with weights.
        self.flops = flops_per_token(run.model, training.seq_length, frozen=run.lora.rank > 0)
        on_gpu = job.device.type == "cuda"
        self.device_name = torch.cuda.get_device_name(job.device) if on_gpu else "CPU"
        # Even with float8, the MFU is relative to the dense peak of the run's precision. So MFUs with and without
        # float8 are comparable.
        self.peak = peak_flops(self.device_name, training.precision, training.float8 != "none") if on_gpu else None
        check_trackers(run)
        self.writer = MetricsWriter(run_dir, resume_step=first_step)
        self.progress = Progress(training.train_steps, log_interval=run.metrics.log_interval)
        goldfish = None if corpora.goldfish is None else corpora.preview().statistics
        self.facts = self._facts(corpora, goldfish)
        self.prediction = PlannerCheck(run, run_dir, on_gpu)
        self.progress.print_facts("Run", self.facts)
        _warn_about_data(corpora, goldfish, training.seq_length)
        # If the run was finished before, keep the run file that it was trained with.
        if first_step < training.train_steps or not (run_dir / RUN_FILE).exists():
            write_output(run_dir / RUN_FILE, to_toml(run))
        self.tracking = Tracking(run, run_dir, first_step)
        self.failure: WriteFailed | None = None
        """The error if the record of a step could not be written, else None. After the next step, the trainer tells all
        other processes that writing failed."""
        self.startup_seconds = time.time() - place.started
        self.started = time.perf_counter()

    def __enter__(self) -> RunRecord:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self.progress.close()
        self.writer.close()
        self.tracking.close(failed=kind is not None)

    def step(self, step: int, figures: SharedFigures, seconds: float, more: Mapping[str, float]) -> None:
        """Record one step. If a file cannot be written, keep the error in ``failure``.

        Args:
            step: Index of the step. The first step is 0.
            figures: Results of the step over all ranks.
            seconds: Duration of the step in seconds.
            more: Metrics that only some runs or steps have, such as the validation loss. The key "skipped" means that
                the step left the weights unchanged.
        """
        # If no token is in the loss (for example, because the batch was left out), a rate has no meaning.
        tokens_per_second = self.tokens_per_step / seconds if figures.kept else 0.0
        tflops = self.flops.training * tokens_per_second / self.run.parallel.world_size / 1e12
        load = self.job.expert_load if figures.kept else None
        metrics = StepMetrics(
            step=step + 1,
            loss=figures.loss,
            grad_norm=figures.grad_norm,
            lr=self.job.learning_rate(step),
            tokens=(step + 1) * self.tokens_per_step,
            tokens_per_second=tokens_per_second,
            model_tflops_per_device=tflops,
            mfu=mfu(tflops, self.peak),
            peak_memory_bytes=max(figures.peak_memory_bytes, peak_memory_bytes(self.job.device)),
            step_seconds=seconds,
            trained_token_share=figures.kept / self.losses_per_step,
            more={**({} if load is None else load.figures()), **more},
        )
        self.progress.update(metrics)
        record = metrics.record()
        self.tracking.log(metrics.step, record)
        try:
            self.writer.write(record)
            if load is not None and self._shows_experts(metrics):
                of_experts = {"step": metrics.step, "tokens": metrics.tokens, **load.by_layer()}
                add_record(self.run_dir / EXPERTS_FILE, of_experts)
            if (compared := self.prediction.after_step(metrics)) is not None:
                self.progress.print_facts("Predicted and measured", compared)
        except WriteFailed as failure:
            self.failure = failure

    def _shows_experts(self, metrics: StepMetrics) -> bool:
        """Return whether to record the load of every expert in this step.

        The load is recorded in the first step, the last step, and about ``EXPERT_RECORDS`` steps in between. Steps
        whose loss is not finite are left out.
        """
        last, interval = self.run.training.train_steps, self.run.metrics.log_interval
        is_due = metrics.step % max(interval, last // EXPERT_RECORDS) == 0 or metrics.step in (1, last)
        return is_due and math.isfinite(metrics.loss)

    def go_back(self, steps: int) -> None:
        """Remove the records of all steps after the first ``steps``, because the run takes these steps again. Raises
        ``failure`` if an earlier line could not be written."""
        if self.failure is not None:
            raise self.failure
        self.writer.close()
        self.writer = MetricsWriter(self.run_dir, resume_step=steps)
        self.tracking.go_back(steps)

    def end(self, outcome: Outcome) -> None:
        """Write and print the summary, and write the sampled text. Raises ``failure`` if an earlier line could not be
        written."""
        if self.failure is not None:
            raise self.failure
        seconds = time.perf_counter() - self.started
        steps = outcome.steps - self.first_step
        facts: dict[str, Fact] = {
            "grid": self.facts["grid"],
            "steps": outcome.steps,
            "final loss": outcome.loss,
            "tokens/s, everything included": steps * self.tokens_per_step / seconds if steps else None,
            "seconds to the first step": round(self.startup_seconds, 1),
            "seconds after it": round(seconds, 1),
            "checkpoint": outcome.checkpoint,
            "ended by": self._ended_by(outcome),
        }
        # If the run was finished before, keep its summary.
        if steps:
            write_output(self.run_dir / SUMMARY_FILE, json.dumps(self.facts | facts | provenance(self.run), indent=1))
        if outcome.sample is not None:
            write_output(self.run_dir / SAMPLE_FILE, outcome.sample)
        self.progress.close()
        self.progress.print_facts("Stopped" if outcome.stopped else "Done", facts)

    def _ended_by(self, outcome: Outcome) -> str:
        best = self.job.best
        if self.first_step >= self.run.training.train_steps:
            return "nothing: all steps were taken before; raise training.train_steps, or give the run another name"
        if outcome.stopped:
            saved = "before the first checkpoint" if outcome.checkpoint is None else "after saving"
            return f"a signal or the time limit, {saved}"
        if outcome.steps < self.run.training.train_steps:
            lowest = "finite loss" if best.loss is None else f"loss below the {best.loss:.4f} of step {best.step}"
            return f"{best.since} validations without a {lowest}"
        return "the last step"

    def _facts(self, corpora: Corpora, masked: MaskStatistics | None) -> dict[str, Fact]:
        run, model = self.run, self.run.model
        facts: dict[str, Fact] = {"run": run.name, "parameters": num_parameters(model)}
        if run.lora.rank:
            trained = sum(math.prod(shape) for shape in trained_shapes(model, run.lora).values())
            share = trained / num_parameters(model)
            facts["LoRA"] = f"rank {run.lora.rank}, {trained:,} parameters trained ({share:.2%})"
        facts |= {
            "grid": f"{run.parallel.describe()} ({run.parallel.world_size} × {self.device_name})",
            "batch": f"{run.training.global_batch_size} sequences = {self.tokens_per_step:,} tokens per step, "
            f"gradient_accumulation_steps {run.gradient_accumulation_steps}",
            "tokens": run.training.train_steps * self.tokens_per_step,
            "model FLOPs per token": self.flops.training,
            "FLOP formula": FLOP_FORMULA,
            "peak": "n/a: no published figure for this device, so no MFU" if self.peak is None else self.peak.source,
            "starts at step": self.first_step,
        }
        for packed in corpora.packing():
            facts["conversations"] = (
                f"{packed.conversations:,} in {packed.windows:,} sequences, {packed.filled:.1%} filled; "
                f"{corpora.preview().trained_share:.1%} of the tokens trained"
            )
        for source in corpora.pairs()[:1]:
            facts["pairs of answers"] = (
                f"{len(source) // 2:,}; {source.cut:,} are cut at their end, and {source.left_out:,} are left out, "
                "because their prompts fill the sequence"
            )
        if masked is not None:
            goldfish = run.masks.goldfish
            facts["goldfish mask"] = (
                f"{goldfish.strategy}, k {goldfish.k}, h {goldfish.h}, from step {goldfish.start_step} on: "
                f"{masked.drop_rate:.1%} not trained, at most {masked.longest_undropped_span} kept in a row"
            )
        return facts


def _warn_about_data(corpora: Corpora, masked: MaskStatistics | None, seq_length: int) -> None:
    """Warn about conversations that do not fit a sequence, and about a goldfish mask that does not suit the text."""
    for packed in corpora.packing():
        if packed.cut or packed.left_out:
            print(
                f"warning: training.seq_length = {seq_length} cuts the end of {packed.cut:,} conversations and leaves "
                f"out {packed.left_out:,} conversations whose answers begin after the cut",
                file=sys.stderr,
            )
    for warning in masked.warnings() if masked is not None else []:
        print(f"warning: {warning}", file=sys.stderr)


def provenance(run: RunConfig) -> dict[str, Fact]:
    """Return labels and values that describe the software and the training corpora of a run. The digest of a corpus
    changes if the texts of the corpus or the options of `fourfold prepare` change."""
    found: dict[str, Fact] = {
        "software": f"fourfold {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    }
    for corpus in run.data.train:
        if (made := read_manifest(corpus.path)) is not None:
            counts = f"{made.documents:,} documents, {made.tokens:,} tokens"
            found[f"corpus {corpus.path}"] = f"{counts}, digest {made.request[:12]}"
    return found
