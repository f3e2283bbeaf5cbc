"""The sections [validation], [loss_scaling], [ema], [dpo], [audit], [evaluation], and [sample] of the run file."""

from __future__ import annotations

from pydantic import Field, model_validator

from fourfold.config.expected_values import shown
from fourfold.config.strict import PathText, Strict


class ValidationConfig(Strict):
    """Validation during training.

    The validation loss decides which checkpoint is the best (`keep_best`) and whether the run ends early (`patience`).
    If [ema](#ema) is on, the validation loss of the averaged weights decides instead.
    """

    interval: int = Field(0, ge=0)
    """Number of steps between validations. 0 disables validation."""
    steps: int = Field(8, gt=0)
    """Number of global batches in one validation."""
    keep_best: bool = False
    """After each validation with a new lowest loss, save a checkpoint. The link checkpoints/best points to this
    checkpoint, and the checkpoint is kept until a later validation has a new lowest loss."""
    patience: int = Field(0, ge=0)
    """End the run after this many consecutive validations without a new lowest loss. 0 disables this rule."""
    min_improvement: float = Field(0.0, ge=0)
    """A loss counts as a new lowest loss only if it is lower than all earlier losses by more than this value."""

    @model_validator(mode="after")
    def _there_are_validations(self) -> ValidationConfig:
        given = [key for key in ("keep_best", "patience") if getattr(self, key)]
        if given and not self.interval:
            raise ValueError(
                f"{given[0]} = {shown(getattr(self, given[0]))} needs validations, and interval = 0 never validates; "
                "interval = 100 works"
            )
        return self


class LossScalingConfig(Strict):
    """Loss scaling for training.precision = 'fp16'. The loss is multiplied by a scale, so that small gradients do not
    become 0. If a gradient overflows, the step is skipped, and the scale is halved."""

    initial: float = Field(65536.0, gt=0)
    """Loss scale at the start of the run."""
    growth_interval: int = Field(2000, gt=0)
    """Double the scale after this many steps without an overflow."""
    max_overflows: int = Field(20, ge=1)
    """End the run after this many consecutive steps with an overflow."""


class EMAConfig(Strict):
    """An exponential moving average of the trained weights (arXiv 1703.01780), in float32 and sharded like the weights.

    Checkpoints include the average. Validation also computes the loss of the averaged weights. `fourfold checkpoint
    export-hf --ema` exports the average ([validation.md](validation.md#a-moving-average-of-the-weights)).
    """

    decay: float = Field(0.0, ge=0, lt=1)
    """Each step sets the average to decay × average + (1 − decay) × weights. A common value is 0.999. 0 (default) keeps
    no average."""


class DPOConfig(Strict):
    """Direct preference optimization (arXiv 2305.18290) on pairs of answers. In each pair, one answer is preferred.

    The loss compares the model with a reference, which is the model at the start of training. fourfold computes the
    reference's log-probabilities of all answers once, on the same grid ([preferences.md](preferences.md)). Batch sizes
    count answers, so a pair counts as two.
    """

    beta: float = Field(0.0, ge=0)
    """DPO's β. Higher values keep the model closer to the reference model. A common value is 0.1. With 0 (default),
    DPO is off, and the run trains on next-token prediction."""


class AuditConfig(Strict):
    """Audits during training. They measure how well the model reproduces canaries. Canaries are documents that were
    planted in the training data ([memorization.md](memorization.md#canaries)). The results are written to
    memorization.jsonl. To audit a saved checkpoint, use `fourfold audit`."""

    interval: int = Field(0, ge=0)
    """Number of steps between audits. If it is above 0, the audit also runs after the last step. 0 disables audits."""
    documents: PathText | None = None
    """Path of a .jsonl file with the documents to audit, such as the list of canaries that `fourfold prepare` wrote."""
    suffix: int = Field(50, ge=1)
    """Number of tokens in a document's suffix (its end). The audit gives the model the tokens before the suffix, and
    checks whether the model reproduces the suffix."""

    @model_validator(mode="after")
    def _documents_given(self) -> AuditConfig:
        if self.interval > 0 and self.documents is None:
            raise ValueError(
                f"interval = {self.interval} is set, but audit.documents names no file; documents = 'canaries.jsonl' "
                "works if that file exists, and interval = 0 works without one"
            )
        return self


class EvaluationConfig(Strict):
    """Run tasks of EleutherAI's evaluation harness (lm-eval) during training, on the training grid. The results are
    written to tasks.jsonl. You need the extra `evaluate`."""

    interval: int = Field(0, ge=0)
    """Number of steps between evaluations. If it is above 0, the tasks also run after the last step. 0 disables
    evaluations."""
    tasks: list[str] = Field([])
    """Names of lm-eval tasks."""
    include_path: PathText | None = None
    """A folder with your own lm-eval tasks."""
    limit: int | None = Field(None, gt=0)
    """Number of documents per task. Default: all."""
    num_fewshot: int | None = Field(None, ge=0)
    """Number of few-shot examples in each prompt. Default: the task's own number."""

    @model_validator(mode="after")
    def _tasks_given(self) -> EvaluationConfig:
        if bool(self.interval) != bool(self.tasks):
            raise ValueError(
                f"interval = {self.interval} and evaluation.tasks = {self.tasks} go together; give both, "
                "such as interval = 100 and tasks = ['hellaswag'], or neither"
            )
        return self


class SampleConfig(Strict):
    prompt: str | None = None
    """Text to continue when training ends. Default: no sample."""
    max_new_tokens: int = Field(200, gt=0)
    """Largest number of tokens in the sample."""
    temperature: float = Field(0.8, ge=0)
    """Temperature of the sampling. 0 always takes the most likely token. Higher values give more varied text."""
