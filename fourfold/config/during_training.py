"""The sections of the run file that say what else happens while a run trains, and when it ends."""

from __future__ import annotations

from pydantic import Field, model_validator

from fourfold.config.expected_values import shown
from fourfold.config.strict import PathText, Strict


class ValidationConfig(Strict):
    """Its loss also decides which checkpoint is the best, and may end the run: that of the moving average of the
    weights where [ema] keeps one."""

    interval: int = Field(0, ge=0, description="Steps between validations; 0 never validates.")
    steps: int = Field(8, gt=0, description="Global batches of one validation.")
    keep_best: bool = Field(
        False,
        description="Save after a validation whose loss is the lowest so far, and keep that checkpoint until a better "
        "one is there; the link checkpoints/best leads to it.",
    )
    patience: int = Field(0, ge=0, description="End the run after so many validations in a row without a new lowest "
                          "loss; 0 never does.")  # fmt: skip
    min_improvement: float = Field(
        0.0, ge=0, description="A loss counts as lower only if it is so much below the lowest before it."
    )

    @model_validator(mode="after")
    def _there_are_validations(self) -> ValidationConfig:
        given = [key for key in ("keep_best", "patience") if getattr(self, key)]
        if given and not self.interval:
            raise ValueError(
                f"{given[0]} = {shown(getattr(self, given[0]))} needs validations, and interval = 0 never validates; "
                "interval = 100 works"
            )
        return self


class EMAConfig(Strict):
    """An exponential moving average of the trained weights (arXiv 1703.01780): float32, cut over the grid as they are.

    It is saved with them, validated beside them, and written by `fourfold checkpoint export-hf --ema`
    ([validation.md](validation.md#a-moving-average-of-the-weights)).
    """

    decay: float = Field(
        0.0, ge=0, lt=1, description="Share of the average that a step keeps, such as 0.999; 0 keeps no average."
    )


class DPOConfig(Strict):
    """Direct preference optimization (arXiv 2305.18290) on pairs of answers, of which one was preferred.

    The reference is the model with which training begins; its log-probabilities of all answers are computed once, on
    the same grid ([preferences.md](preferences.md)). Batch sizes count answers: two for each pair.
    """

    beta: float = Field(
        0.0, ge=0, description="Strength of the pull to the reference, such as 0.1; 0 trains by next tokens."
    )


class AuditConfig(Strict):
    """Audits of canaries during training, written to memorization.jsonl; `fourfold audit` measures more."""

    interval: int = Field(0, ge=0, description="Steps between audits; 0 never audits. The last step is audited too.")
    documents: PathText | None = Field(None, description="Ledger of canaries, or any documents: a .jsonl file.")
    suffix: int = Field(50, ge=1, description="Tokens at the end of a document that must be repeated.")

    @model_validator(mode="after")
    def _documents_given(self) -> AuditConfig:
        if self.interval > 0 and self.documents is None:
            raise ValueError(
                f"interval = {self.interval} is set, but audit.documents names no file; documents = 'canaries.jsonl' "
                "works if that file exists, and interval = 0 works without one"
            )
        return self


class EvaluationConfig(Strict):
    """Tasks of lm-eval during training, on its own grid, written to tasks.jsonl (needs the extra `evaluate`)."""

    interval: int = Field(0, ge=0, description="Steps between evaluations; 0: none. The last step is evaluated too.")
    tasks: list[str] = Field([], description="Tasks by lm-eval's names.")
    include_path: PathText | None = Field(None, description="A folder with tasks of your own.")
    limit: int | None = Field(None, gt=0, description="Documents per task. Default: all.")
    num_fewshot: int | None = Field(None, ge=0, description="Examples in a task's prompt. Default: the task's.")

    @model_validator(mode="after")
    def _tasks_given(self) -> EvaluationConfig:
        if bool(self.interval) != bool(self.tasks):
            raise ValueError(
                f"interval = {self.interval} and evaluation.tasks = {self.tasks} go together; give both, "
                "such as interval = 100 and tasks = ['hellaswag'], or neither"
            )
        return self


class SampleConfig(Strict):
    prompt: str | None = Field(None, description="Text to continue when training ends. Default: no sample.")
    max_new_tokens: int = Field(200, gt=0, description="Tokens of the sample, unless its document ends before.")
    temperature: float = Field(0.8, ge=0, description="0 takes the likeliest token.")
