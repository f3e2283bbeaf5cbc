"""Read and write `state.json`, which holds everything in a checkpoint except its tensors."""

import base64
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import BeforeValidator, Field, model_validator

from fourfold.checkpoints.find_checkpoints import STATE_FILE, is_step_name, step_of
from fourfold.checkpoints.integrity import ELSEWHERE, DamagedCheckpoint, check_small_file, damaged
from fourfold.config.low_rank import LoRAConfig
from fourfold.config.model import ModelConfig
from fourfold.config.optimizer_rules import UpdateRule
from fourfold.config.parameter_counts import check_countable
from fourfold.config.run import RunConfig, SchedulerConfig
from fourfold.config.strict import Strict
from fourfold.errors import UserError
from fourfold.parsing import parse_json

FORMAT = 3
LAYOUT_FREE_KEYS = {"preset", "from_hf", "initializer_range"}
"""Keys of [model] that a checkpoint does not store, because they change neither a tensor's shape nor its meaning."""

_COMPARED: dict[str, Any] = {
    "training": {"train_steps", "precision", "master_weights", "reduce_dtype", "float8"},
    "data": {"mask_documents"},
    **dict.fromkeys(("optimizer", "lr_scheduler", "moe", "dpo", "ema"), True),
}
"""Sections and keys of the run file. If one of them has changed when a run resumes, the run prints a warning."""

_MEASURED = {
    "validation": {"steps"},
    "audit": {"documents", "suffix"},
    "evaluation": {"include_path", "limit", "num_fewshot"},
}
"""Keys of sections that measure the model during training. If one of them has changed, the run prints the same warning,
unless the section's interval is 0."""


class RecentSteps(Strict):
    """Losses and gradient norms of recent steps. The checks of the section [checks] compare later steps with them.

    A step that fails a check is a *bad* step.
    """

    losses: list[float] = Field([])
    """Losses of the last `checks.spike_window` good steps. Empty if `checks.spike` is "off"."""
    grad_norms: list[float] = Field([])
    """Gradient norms of the steps in `losses`."""
    skipped_in_a_row: int = 0
    """Number of bad steps since the last good step."""
    overflows_in_a_row: int = 0
    """Number of steps with an fp16 overflow since the last step without an overflow."""


class StreamPosition(Strict):
    """The position in a streamed dataset at which a resumed run continues."""

    source: str
    """Name of the dataset."""
    text_key: str
    """Name of the column that contains the text."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    shuffle_buffer: int = 0
    """Number of documents that each stream shuffles at a time. 0 keeps the dataset's order."""
    positions: list[dict[str, Any]]
    """Position of each of the dataset's streams, with the fields of `data.stream.Position`."""


class BestValidation(Strict):
    """The lowest validation loss so far, and when the run reached it."""

    loss: float | None = None
    step: int = 0
    """Number of finished steps when the run reached this loss."""
    since: int = 0
    """Number of validations since the run reached this loss."""


class SavedSchedule(SchedulerConfig, alias_generator="lr_scheduler.{}".format, extra="ignore"):
    """The keys in `CheckpointState.optimization` that determine the learning rate."""

    train_steps: int = Field(gt=0, alias="training.train_steps")
    lr: float = Field(gt=0, alias="optimizer.lr")
    optimizer: UpdateRule = Field(alias="optimizer.name")


class CheckpointState(Strict):
    """The content of `state.json`."""

    format: int
    step: int = Field(ge=0)
    """Number of finished training steps. Together with the settings in `training`, it determines the position in the
    data."""
    model: dict[str, Any]
    """The section [model] without `LAYOUT_FREE_KEYS`."""
    training: dict[str, int]
    """The result of `sample_order`. Together with `step`, it determines which samples come next."""
    rng: str
    """State of torch's default generator, in base64."""
    optimizer_steps: int | None = Field(None, ge=0)
    """Number of steps that changed the weights. Steps with an fp16 overflow and skipped bad steps are not counted. None
    for imported models."""
    loss_scale: tuple[float, int] | None = Field(None, strict=False)
    """The loss scale of fp16, and the number of steps since it last changed."""
    recent: RecentSteps = RecentSteps()
    best: BestValidation = BestValidation()
    has_averages: bool = False
    """Whether the checkpoint also has moving averages of the trained weights."""
    expert_rows: list[list[int]] | None = None
    """For each layer, the number of tokens that chose each expert in the most recent step that changed the weights.
    None for dense models."""
    stream: StreamPosition | None = None
    """The position in the streamed dataset. None for corpora on disk, because `step` determines their position."""
    masks: dict[str, Any] | None = None
    """The section [masks], which says which tokens are part of the loss. None for imported models."""
    optimization: dict[str, Any] | None = None
    """The result of `compared_settings`. None for imported models."""
    first_samples: Annotated[dict[str, str] | None, BeforeValidator(lambda v: None if isinstance(v, str) else v)] = None
    """Digests that reveal whether the data on disk has changed (`Corpora.first_samples`). Older versions of fourfold
    wrote a single digest, which is ignored."""
    weights_only: bool = False
    """True for an imported model. A run that starts from an imported model begins at step 0."""
    lora: LoRAConfig | None = None
    """The section [lora] if the run trained only adapters. The checkpoint then has only the adapters."""
    base: str | None = None
    """The model that the LoRA adapters belong to: a path, or a name on the Hugging Face Hub. None without adapters."""
    optimizer: UpdateRule = "adamw"
    """The value of optimizer.name. It determines which optimizer states the checkpoint has."""

    @model_validator(mode="after")
    def _check_possible(self) -> Self:
        if self.optimizer_steps is not None and self.optimizer_steps > self.step:
            raise ValueError(f"optimizer_steps = {self.optimizer_steps} is more than step = {self.step}")
        if self.loss_scale is not None and (self.loss_scale[0] <= 0 or self.loss_scale[1] < 0):
            raise ValueError(f"loss_scale = {self.loss_scale} is negative")
        if self.optimization is not None:
            SavedSchedule(**self.optimization)
        model = ModelConfig(**self.model)
        check_countable(model)
        layers = model.num_hidden_layers + model.num_nextn_predict_layers
        if self.expert_rows is not None and list(map(len, self.expert_rows)) != [model.num_experts] * layers:
            raise ValueError("expert_rows do not fit the model")
        return self

    def generator(self, path: Path) -> torch.Generator:
        """Create a random generator with the saved state.

        Raises:
            DamagedCheckpoint: The saved state is invalid.
        """
        generator = torch.Generator()
        try:
            generator.set_state(torch.frombuffer(bytearray(base64.b64decode(self.rng)), dtype=torch.uint8))
        except (ValueError, RuntimeError) as error:
            raise damaged(path / STATE_FILE, "its random state is invalid") from error
        return generator


def state_of(run: RunConfig, step: int) -> CheckpointState:
    """Return the content of `state.json` for a run after `step` steps.

    The caller adds the fields that do not follow from the run file, such as `optimizer_steps` and `stream`.
    """
    return CheckpointState(
        format=FORMAT,
        step=step,
        model=saved_model(run.model),
        training=sample_order(run),
        masks=run.masks.model_dump(mode="json"),
        optimization=compared_settings(run),
        rng=_rng_state(),
        lora=run.lora if run.lora.rank else None,
        base=None if not run.lora.rank or run.model.from_hf is None else absolute_name(run.model.from_hf),
        optimizer=run.optimizer.name,
    )


def compared_settings(run: RunConfig) -> dict[str, Any]:
    """Return the settings that a checkpoint saves, so that a resumed run can warn if its run file has other values.

    The settings determine how the weights change and what is measured during training, such as `optimizer.lr` and
    `validation.steps`. A checkpoint stores them as plain JSON. So a later version of fourfold can read the checkpoint
    even if that version has renamed a key.
    """
    measured = {section: keys for section, keys in _MEASURED.items() if getattr(run, section).interval}
    sections = run.model_dump(mode="json", include=_COMPARED | measured).items()
    return {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}


def write_state(folder: Path, state: CheckpointState) -> None:
    """Write `state.json` into a checkpoint's folder."""
    (folder / STATE_FILE).write_text(state.model_dump_json(indent=1) + "\n")


def imported_state(model: ModelConfig) -> CheckpointState:
    """Return the content of `state.json` for an imported model, which has no training state."""
    return CheckpointState(
        format=FORMAT, step=0, model=saved_model(model), training={}, rng=_rng_state(), weights_only=True
    )


def read_state(path: Path) -> CheckpointState:
    """Read `state.json` from a checkpoint's folder.

    Raises:
        DamagedCheckpoint: The file cannot be read, is not a valid state, or belongs to another step.
        UserError: The checkpoint has another format.
    """
    file = path / STATE_FILE
    try:
        check_small_file(file)
        text = file.read_text(encoding="utf-8")
        known = parse_json(text)
        if isinstance(known, dict) and isinstance(known.get("format"), int) and known["format"] != FORMAT:
            raise UserError(
                f"{path} has checkpoint format {known['format']}; this version of fourfold reads {FORMAT}; use the "
                "version that wrote the checkpoint"
            )
        state = CheckpointState.model_validate_json(text)
    except OSError as error:
        raise DamagedCheckpoint(f"cannot read the checkpoint {path}: {error.strerror}{ELSEWHERE}") from None
    except UserError:
        raise
    except ValueError:  # The file is not UTF-8, not JSON, or not a valid state.
        raise damaged(file, "it is not a valid state") from None
    if is_step_name(path.name) and step_of(path) != state.step:
        raise damaged(path, f"it has the content of step {state.step}")
    return state


def saved_model(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of [model] that a checkpoint stores, with their values."""
    return {key: value for key, value in model.model_dump(mode="json").items() if key not in LAYOUT_FREE_KEYS}


def sample_order(run: RunConfig) -> dict[str, int]:
    """Return the settings that determine which samples come next, given the number of finished steps."""
    return {key: getattr(run.training, key) for key in ("seed", "global_batch_size", "seq_length")}


def absolute_name(model: str) -> str:
    """Return a model's folder as an absolute path. Return the name of a model on the Hub unchanged."""
    folder = Path(model).expanduser()
    return str(folder.resolve()) if folder.is_dir() else model


def _rng_state() -> str:
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
