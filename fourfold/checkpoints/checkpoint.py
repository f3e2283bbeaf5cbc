"""Checkpoints that any grid can read: safetensors shards of global tensors and one JSON file, written whole or not.

    checkpoints/step_100/
        shard-00001-model-00001-of-00001.safetensors   each process's parts, with their place in the global tensor
        …
        state.json                                     step, model sizes, random state, and the size of every file

Tensors go through torch.distributed.checkpoint under ``model.<name>`` and ``optimizer.<moment>.<name>``.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field, ValidationError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from fourfold.config.model import ModelConfig
from fourfold.config.run import CheckpointConfig, LoRAConfig, RunConfig
from fourfold.config.strict import Strict
from fourfold.errors import UserError
from fourfold.parallel.state import GlobalView
from fourfold.training.job import Job

FORMAT = 1
STATE_FILE = "state.json"
# Keys of [model] that change neither a tensor's shape nor its meaning.
_IRRELEVANT = {"preset", "from_hf", "initializer_range"}


class CheckpointState(Strict):
    """What a checkpoint knows besides tensors.

    step: training steps taken; it is also the position in the data, as long as ``training`` says the same.
    optimizer_steps: of these, the ones that moved the weights; loss_scale: its value, and the steps since it changed.
    weights_only: it was imported, and a run that begins with it has taken no step. lora: the run's table where only
    adapters were trained, and are here; base: the model that they belong to.
    """

    format: int
    step: int = Field(ge=0)
    model: dict[str, Any]
    training: dict[str, int]
    rng: str
    files: dict[str, int]
    optimizer_steps: int | None = None
    loss_scale: tuple[float, int] | None = Field(None, strict=False)
    weights_only: bool = False
    lora: LoRAConfig | None = None
    base: str | None = None


class Checkpointer:
    """Saves a job into a folder, and prunes old checkpoints there."""

    def __init__(self, folder: Path, job: Job, config: CheckpointConfig) -> None:
        self.folder, self.job, self.config = folder, job, config
        self._view = GlobalView(job.grid, job.run.parallel.zero)
        self._pending: tuple[Future, int, CheckpointState] | None = None
        # The writer's collectives run in a thread beside the training step: they need a group of their own.
        asynchronous = config.async_mode == "async"
        self._group = dist.new_group(backend="gloo") if asynchronous else None

    def save(self, step: int) -> None:
        """Write ``step_<step>``; with async_mode it appears when it is whole, at a later ``poll`` or ``wait``."""
        self.wait()
        partial = self._partial(step)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        run = self.job.run
        state = CheckpointState(
            format=FORMAT,
            step=step,
            model=_sizes(run.model),
            training=_order(run),
            rng=_rng_state(),
            files={},
            optimizer_steps=self.job.optimizer.steps_taken(),
            loss_scale=None if self.job.loss_scale is None else self.job.loss_scale.state(),
            lora=run.lora if run.lora.rank else None,
            base=_base_of(run),
        )
        writer = dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True)
        tensors = global_tensors(self.job, self._view)
        if self._group is None:
            with failures_told(f"cannot write the checkpoint {partial}"):
                dcp.save(tensors, storage_writer=writer)
            self._publish(step, state)
            dist.barrier()
        else:
            future = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
            self._pending = (future, step, state)

    def poll(self) -> None:
        """Publish an asynchronous save that has finished."""
        if self._pending is not None and self._pending[0].done():
            self.wait()

    def wait(self) -> None:
        """Wait for an asynchronous save, and publish it."""
        if self._pending is None:
            return
        future, step, state = self._pending
        self._pending = None
        with failures_told(f"cannot write the checkpoint {self._partial(step)}"):
            future.result()
        self._publish(step, state)

    def _partial(self, step: int) -> Path:
        return self.folder / f".step_{step}.partial"

    def _publish(self, step: int, state: CheckpointState) -> None:
        """On rank 0, when every rank has written: describe, rename, prune.

        Checkpoints of later steps are of another history, from which this run has turned back (``resume`` = 'never' or
        a path): they are kept under another name, so that neither pruning nor resume = 'auto' takes them for its own.
        """
        if dist.get_rank() != 0:
            return
        partial, final = self._partial(step), self.folder / f"step_{step}"
        state.files.update({file.name: file.stat().st_size for file in partial.glob("*.safetensors")})
        (partial / STATE_FILE).write_text(state.model_dump_json(indent=1) + "\n")
        replaced = self.folder / f".step_{step}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():
            os.replace(final, replaced)
        os.replace(partial, final)
        shutil.rmtree(replaced, ignore_errors=True)
        for unfinished in self.folder.glob(".step_*.partial"):  # of a job that was killed
            shutil.rmtree(unfinished)
        ours = [path for path in list_checkpoints(self.folder) if _step_of(path) <= step]
        for later in list_checkpoints(self.folder)[len(ours) :]:
            superseded = later.with_name(f"{later.name}.superseded")
            shutil.rmtree(superseded, ignore_errors=True)
            os.replace(later, superseded)
        if self.config.keep_latest_k:
            for old in ours[: -self.config.keep_latest_k]:
                shutil.rmtree(old)


def load_checkpoint(path: Path, job: Job) -> int:
    """Fill a job's weights and optimizer from a checkpoint that any grid has written; returns the steps taken.

    Raises ``UserError`` when the checkpoint is damaged or belongs to another model. The job is untouched then, unless
    the damage is inside a file of the right size.
    """
    state = read_state(path)
    check_same_model(path, state, job.run.model)
    check_same_adapters(path, state, job.run)
    if state.weights_only:
        load_model(path, job)
        return 0
    check_same_order(path, state, job.run)
    generator = _generator(path, state)
    tensors = global_tensors(job, GlobalView(job.grid, job.run.parallel.zero))
    load_tensors(tensors, path)
    job.optimizer.set_steps_taken(state.step if state.optimizer_steps is None else state.optimizer_steps)
    if job.loss_scale is not None and state.loss_scale is not None:
        job.loss_scale.scale, job.loss_scale.steps_since_change = state.loss_scale
    _fill_second_copies(job)
    job.publish()
    torch.set_rng_state(generator.get_state())
    return state.step


def load_model(path: Path, job: Job) -> None:
    """Fill a job's weights from a checkpoint that any grid has written, and give its optimizer no memory.

    Raises ``UserError`` when the checkpoint is damaged or belongs to another model.
    """
    state = read_state(path)
    check_same_model(path, state, job.run.model)
    check_whole(path, state)
    view = GlobalView(job.grid, job.run.parallel.zero)
    first = {shard.name: shard for shard in reversed(job.shards)}
    load_tensors({f"model.{name}": view.of(shard) for name, shard in first.items()}, path)
    with torch.no_grad():
        for shard in job.shards:
            if shard is not first[shard.name]:
                shard.local.copy_(first[shard.name].local)
    job.publish()


def load_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Fill whole tensors, by parameter name, in one process and without a process group."""
    read_state(path)
    load_tensors({f"model.{name}": tensor for name, tensor in weights.items()}, path, no_dist=True)


def write_imported(path: Path, model: ModelConfig, files: dict[str, int]) -> None:
    """Make a checkpoint of the weights ``files`` (name to bytes) that already stand in the folder ``path``."""
    state = CheckpointState(
        format=FORMAT, step=0, model=_sizes(model), training={}, rng=_rng_state(), files=files, weights_only=True
    )
    (path / STATE_FILE).write_text(state.model_dump_json(indent=1) + "\n")


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints in a folder, oldest first."""
    found = [p for p in folder.glob("step_*") if p.name[5:].isdecimal() and (p / STATE_FILE).exists()]
    return sorted(found, key=_step_of)


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint that ``checkpoint.resume`` means: the newest in ``folder``, none, or the one at a path."""
    if resume == "never":
        return None
    if resume == "auto":
        return (list_checkpoints(folder) or [None])[-1]
    path = Path(resume)
    if not (path / STATE_FILE).exists():
        inside = list_checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
        if not inside:
            raise UserError(f"checkpoint.resume = '{resume}': there is no checkpoint (a folder with {STATE_FILE})")
        return inside[-1]
    return path


def read_state(path: Path) -> CheckpointState:
    """Read and check ``state.json``; ``UserError`` when the checkpoint is damaged."""
    try:
        text = (path / STATE_FILE).read_text(encoding="utf-8")
        known = json.loads(text)
        if isinstance(known, dict) and isinstance(known.get("format"), int) and known["format"] != FORMAT:
            raise UserError(f"{path} has checkpoint format {known['format']}; this version of fourfold reads {FORMAT}")
        state = CheckpointState.model_validate_json(text)
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, ValidationError):
        raise UserError(f"{path / STATE_FILE} is damaged; resume from another checkpoint") from None
    if not state.files:
        raise UserError(f"{path / STATE_FILE} is damaged: it lists no file; resume from another checkpoint")
    for name, size in state.files.items():
        file = path / name
        if not file.exists() or file.stat().st_size != size:
            raise UserError(f"the checkpoint {path} is damaged: {name} is missing or not {size} bytes long")
    return state


def check_same_model(path: Path, state: CheckpointState, model: ModelConfig) -> None:
    """Raise ``UserError`` naming the first size in which the checkpoint's model differs from ``model``."""
    defaults = {key: field.default for key, field in ModelConfig.model_fields.items() if key not in _IRRELEVANT}
    for key, was, now in _differences(defaults | state.model, _sizes(model)):  # written before a key was there
        raise UserError(
            f"the checkpoint {path} is of another model: its {key} is {was!r}, and the run file's is {now!r}"
        )


def check_same_adapters(path: Path, state: CheckpointState, run: RunConfig) -> None:
    """Raise ``UserError`` when the checkpoint's adapters are others than the run's, belong to another model, or only
    one of them has any."""
    was, now = state.lora or LoRAConfig(), run.lora
    if (was.rank, now.rank) == (0, 0):
        return
    for key, theirs in was.model_dump().items():
        ours = getattr(now, key)
        if theirs != ours:
            raise UserError(
                f"the checkpoint {path} was trained with lora.{key} = {theirs!r}, and the run file has {ours!r}; set "
                "it back, or set checkpoint.resume = 'never'"
            )
    theirs, ours = (None if base is None else _resolved(base) for base in (state.base, run.model.from_hf))
    if theirs != ours:
        raise UserError(
            f"the adapters of the checkpoint {path} belong to the model {theirs}, and model.from_hf is {ours}; set it "
            "back, or set checkpoint.resume = 'never'"
        )


def check_whole(path: Path, state: CheckpointState) -> None:
    """Raise ``UserError`` for adapters without the model that they belong to."""
    if state.lora is not None:
        raise UserError(f"{path} has LoRA adapters only; `fourfold export-hf {path} OUT --merge` makes a model of it")


def check_same_order(path: Path, state: CheckpointState, run: RunConfig) -> None:
    """Raise ``UserError`` when the run's steps are of other samples than those that the checkpoint has counted."""
    for key, was, now in _differences(state.training, _order(run)):
        raise UserError(
            f"the checkpoint {path} was trained with training.{key} = {was}, and the run file has {now}, with which "
            "samples would be repeated or skipped; set it back, or set checkpoint.resume = 'never'"
        )


def _differences(saved: dict[str, Any], wanted: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Key, saved value and wanted value wherever they differ."""
    return ((key, saved.get(key), value) for key, value in wanted.items() if saved.get(key) != value)


def global_tensors(job: Job, view: GlobalView) -> dict[str, Tensor]:
    """Trained weights, and their moments, as global tensors that alias the job's memory; of two copies of one, the
    first."""
    tensors: dict[str, Tensor] = {}
    for index, shard in enumerate(job.trained):
        if f"model.{shard.name}" in tensors:
            continue
        tensors[f"model.{shard.name}"] = view.of(shard)
        for moment, local in job.optimizer.moments(index).items():
            tensors[f"optimizer.{moment}.{shard.name}"] = view.of(shard, local)
    return tensors


@torch.no_grad()
def _fill_second_copies(job: Job) -> None:
    """Both ends of a V-shaped pipeline are on one process, which reads a tied embedding once."""
    first: dict[str, int] = {}
    for index, shard in enumerate(job.trained):
        copied = first.setdefault(shard.name, index)
        if copied != index:
            shard.local.copy_(job.trained[copied].local)
            for moment, tensor in job.optimizer.moments(index).items():
                tensor.copy_(job.optimizer.moments(copied)[moment])


def load_tensors(tensors: dict[str, Tensor], path: Path, no_dist: bool = False) -> None:
    with failures_told(f"the checkpoint {path} is damaged"), _torch_silenced():
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=no_dist)


@contextmanager
def _torch_silenced() -> Iterator[None]:
    """The reader warns of every file of a distributed save, which is how ours are, of a load without processes, and
    logs the traceback of what it then raises."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)


@contextmanager
def failures_told(what: str) -> Iterator[None]:
    """Turn torch's CheckpointException, which is no Exception and would pass by every handler, into a sentence."""
    try:
        yield
    except CheckpointException as error:
        reason, _ = next(iter(error.failures.values()))
        raise UserError(f"{what}: {str(reason).partition(chr(10))[0] or type(reason).__name__}") from error


def _base_of(run: RunConfig) -> str | None:
    """The model that a run's adapters belong to."""
    return None if not run.lora.rank or run.model.from_hf is None else _resolved(run.model.from_hf)


def _resolved(name: str) -> str:
    """A folder by its absolute path; a name on the Hub as it is."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.is_dir() else name


def _sizes(model: ModelConfig) -> dict[str, Any]:
    return {key: value for key, value in model.model_dump(mode="json").items() if key not in _IRRELEVANT}


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _generator(path: Path, state: CheckpointState) -> torch.Generator:
    """One in the state that the checkpoint was saved in."""
    generator = torch.Generator()
    try:
        generator.set_state(torch.frombuffer(bytearray(base64.b64decode(state.rng)), dtype=torch.uint8))
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{path / STATE_FILE} is damaged: its random state is none; resume from another one") from error
    return generator


def _order(run: RunConfig) -> dict[str, int]:
    """What decides, with the step, which samples are next."""
    return {key: getattr(run.training, key) for key in ("seed", "global_batch_size", "seq_length")}


def _rng_state() -> str:
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode()
