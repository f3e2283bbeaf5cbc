"""Compare the results of a job on its grid with the results of one process, step by step."""

import math
import shutil
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fourfold.config.run import ParallelConfig, RunConfig
from fourfold.data.atomic_files import WriteFailed
from fourfold.data.loader import MicroBatch
from fourfold.environment import Place
from fourfold.errors import UserError
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.parallel.grid.shared_failure import decided_by_rank_0
from fourfold.parallel.state import LocalShard, gather_parts, join_parts
from fourfold.training.job import Job
from fourfold.verification.audit_parity import audit_deviations
from fourfold.verification.batches import random_micro_batches
from fourfold.verification.deviation import (
    amplification,
    deviation,
    deviations,
    largest_differences,
    replica_difference,
)
from fourfold.verification.initial_weights import initial_weights_error
from fourfold.verification.not_compared import Against
from fourfold.verification.one_process import Figures, PlainLogits, Reference
from fourfold.verification.parity_report import LIMIT, Deviation
from fourfold.verification.random_rounding import gradient_noise
from fourfold.verification.reference_batches import random_batch
from fourfold.verification.trained_run import compare_records, train_and_resume
from fourfold.verification.transformers_reference import transformers_logits
from fourfold.verification.uneven_experts import skew_router_biases

OF_GRADIENTS = 4.0
"""Divisor of ``amplification`` for gradients in preference training (section [dpo]).

In a gradient, the errors of a step's preference pairs partly cancel, so the full amplification would allow too large an
error. If a gradient exceeds the limit with the divided amplification, parity measures with random rounding how large
the error may be.
"""


class Comparison:
    """Compares a job on the grid with two reference models on one process, in float32 and in float64. The references
    run on rank 0, and take the same steps as the job."""

    def __init__(self, job: Job, against: Against) -> None:
        """Prepare the job and the references. If routers have biases, change the biases so that experts get uneven
        loads. Then create the references with the job's weights.

        Raises:
            UserError: ``against`` is "transformers", and the transformers library is missing or has no such model.
        """
        self.deviations: dict[str, list[Deviation]] = {}
        self.replicas = self.initial = 0.0
        self.amplification = amplification(job.run)
        self.own_types: list[Deviation] = []
        self.start: dict[str, Tensor] = {}
        """The initial weights. Only rank 0 has them."""
        self.skewed: dict[str, Tensor] = {}
        """The weights before the first step: the initial weights with skewed router biases. Only rank 0 has them."""
        self.steps: dict[int, float] = {}
        """The steps that the references have taken. Maps the index of a step to its clipping limit."""
        self.references: list[Reference] = []
        self.update_noise: dict[str, float] = {}
        """How far the rounding errors in the gradients of one process can move the weights through AdamW's updates, by
        tensor name. Each value is a sum over all steps so far."""
        if against == "transformers":
            # If transformers cannot compute this model, fail on every process now, not later on rank 0 alone.
            config_of(job.run.model)
        initial = self.gather(job.shards, [shard.local for shard in job.shards])
        skew_router_biases(job)
        weights = self.gather(job.shards, [shard.local for shard in job.shards])
        if initial is None or weights is None:
            return
        self.start, self.skewed, self.initial = initial, weights, initial_weights_error(job.run, initial)
        self.logits = PlainLogits(job.run) if against == "plain" else transformers_logits(job.run, job.device)
        self.references = self._references(job.run, job.device, weights)

    def step(self, job: Job, step: int) -> None:
        """Take one training step on the grid and with the references, and compare all results of the step.

        Raises:
            UserError: The loss has no label in this step.
        """
        micro_batches = random_micro_batches(job.run, step, job.grid, job.device)
        kept = job.count_kept(micro_batches)
        if kept.item() == 0:
            raise UserError(
                f"step {step + 1} has no label in the loss of its random samples, so it compares nothing; give a "
                "larger training.global_batch_size or seq_length"
            )
        validation = self._validated(job, micro_batches) if step == 0 else []
        audit = audit_deviations(job, self.references, self.amplification) if step == 0 else []
        loss = job.forward_backward(micro_batches, kept)
        scale = 1.0 if job.loss_scale is None else job.loss_scale.scale
        graded = [shard for shard in job.trained if shard.grad is not None]
        gradients = self.gather(graded, [shard.grad / scale for shard in graded if shard.grad is not None])
        norm = job.clip()
        job.update(step, norm)
        weights = self.gather(job.shards, [shard.local for shard in job.shards])
        if gradients is not None and weights is not None:
            batch, most = random_batch(job.run, step, job.device), job.run.optimizer.max_grad_norm
            one, exact = (reference.step(step, batch, most) for reference in self.references)
            self.steps[step] = most
            self._add("loss", [self._deviation("loss", loss, one.loss, exact.loss)])
            self._add("validation", validation)
            self._add("audit", audit)
            self._add("grad_norm", [self._deviation("grad_norm", norm, one.grad_norm, exact.grad_norm)])
            self._add("gradients", self._of_gradients(gradients, one, exact))
            self._add_update_noise(one, exact, most)
            self._compare_weights("weights", weights)
        self._compare_averages("averages", job)

    def resumed(self, run: RunConfig, other: ParallelConfig, place: Place, overflows: bool) -> None:
        """Train a run with the trainer itself, and resume it on another grid. Then compare the recorded metrics and the
        weights with the references.

        If the trainer stops with an error, but parity has already found a deviation, report the error as one more
        deviation.

        Args:
            run: The run.
            other: The grid that the run is resumed on.
            place: The rank of this process, and the size of the job.
            overflows: Whether the gradients of one step overflow on purpose.

        Raises:
            UserError: The trainer stopped with an error, and parity has found no deviation so far.
            WriteFailed: The run's folder cannot be written.
        """
        try:
            job, recorded = train_and_resume(run, other, place, overflows)
            weights = self.gather(job.shards, [shard.local for shard in job.shards])
            if weights is not None:
                # Do not reset ``update_noise``, because its values hold for this run too.
                self.references = self._references(run, job.device, self.start)
                self._add("resumed", compare_records(run, recorded, self.references))
                self._compare_weights("resumed", weights)
            self._compare_averages("resumed", job)
        except WriteFailed:
            raise
        except UserError as refusal:
            # If parity has found a fault already, the same fault may have stopped the trainer.
            if decided_by_rank_0(self._is_within_limit):
                raise
            self._add("resumed", [Deviation(f"the trainer stopped: {refusal}", math.inf, 0.0)])
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(run.output_dir, ignore_errors=True)

    def dropped_step(self, job: Job, step: int) -> None:
        """Compute a step on the grid, but drop its update, as training does when gradients overflow. The references do
        not take this step.

        In models with experts, do nothing: a dropped step changes the recorded load of the experts on the grid, but not
        in the references.
        """
        if job.run.model.num_experts:
            return
        micro_batches = random_micro_batches(job.run, step, job.grid, job.device)
        job.forward_backward(micro_batches, job.count_kept(micro_batches))
        job.clip()
        if job.loss_scale is None:
            job.skip_update()
        else:
            job.update(step, math.inf)

    def _validated(self, job: Job, micro_batches: Sequence[MicroBatch[Tensor]]) -> list[Deviation]:
        """Evaluate the first step's samples as validation does, and compare the loss with the references."""
        loss = job.evaluate(micro_batches)
        batch = random_batch(job.run, 0, job.device) if self.references else None
        of_references = [reference.evaluate(batch)["loss"] for reference in self.references if batch is not None]
        return [self._deviation("loss", loss, *of_references)] if of_references else []

    def _of_gradients(self, gradients: dict[str, Tensor], one: Figures, exact: Figures) -> list[Deviation]:
        """Compare the gradients of a step. If a gradient deviates too far, measure with random rounding how large its
        error on one process can be, and compare again."""
        results = gradients, one.gradients, exact.gradients
        least = max(1.0, self.amplification / OF_GRADIENTS)
        found = deviations(*results, None, least)
        if all(each.ratio <= LIMIT for each in found):
            return found
        noise = gradient_noise(self.references[0], self.skewed, self.steps, exact)
        return deviations(*results, noise, least)

    def _is_within_limit(self) -> bool:
        return all(each.ratio <= LIMIT for found in self.deviations.values() for each in found)

    def _compare_weights(self, quantity: str, weights: dict[str, Tensor]) -> None:
        one, exact = (reference.weights() for reference in self.references)
        self._add(quantity, deviations(weights, one, exact, self._noise()))

    def _noise(self) -> dict[str, float]:
        """Return how far float32 rounding errors can move the weights, by tensor name. Tensors that Muon updates have
        no value.

        Lion limits each update to ±1, which hides most rounding errors. By chance, different errors stay visible on the
        grid and on one process. So the value of a tensor that Lion updates is the deviation that one process would have
        without this limit.

        If a gradient is far above eps, AdamW hides its rounding error, because the size of the update does not depend
        on the size of the gradient. If a gradient is far below eps, AdamW multiplies its rounding error by lr / eps. So
        the value of a tensor that AdamW updates is ``update_noise``, which assumes this factor for all gradients.
        """
        one, exact = (reference.uncut_weights() for reference in self.references)
        return {**self.update_noise, **largest_differences(one, exact)}

    def _add_update_noise(self, one: Figures, exact: Figures, max_grad_norm: float) -> None:
        reference = self.references[0]
        optimizer, own = reference.run.optimizer, reference.optimizer.own
        factor = optimizer.lr / optimizer.eps * min(1.0, max_grad_norm / max(float(exact.grad_norm), 1e-30))
        for name, noise in largest_differences(one.gradients, exact.gradients).items():
            if name not in own:
                self.update_noise[name] = self.update_noise.get(name, 0.0) + factor * noise

    def _compare_averages(self, quantity: str, job: Job) -> None:
        if job.average is not None and (averages := self.gather(job.trained, job.average.averages)) is not None:
            one, exact = (reference.averages for reference in self.references)
            self._add(quantity, deviations(averages, one, exact, self._noise()))

    def _references(self, run: RunConfig, device: torch.device, weights: dict[str, Tensor]) -> list[Reference]:
        return [Reference(run, self.logits, weights, device, dtype) for dtype in (torch.float32, torch.float64)]

    def _deviation(self, name: str, got: Tensor, one: Tensor, exact: Tensor) -> Deviation:
        return deviation(name, got, one, exact, self.amplification)

    def _add(self, quantity: str, found: list[Deviation]) -> None:
        self.deviations.setdefault(quantity, []).extend(found)

    def gather(self, shards: Sequence[LocalShard], tensors: Sequence[Tensor]) -> dict[str, Tensor] | None:
        """Join the shards of all processes. Return the full tensors by name on rank 0, and None on other ranks. Also
        record the largest difference between two processes' copies of the same shard."""
        parts = gather_parts(shards, tensors)
        if parts is None:
            return None
        self.replicas = max(self.replicas, replica_difference(parts))
        return join_parts(parts)
