"""Save and load checkpoints that any grid can read.

A checkpoint stores parts of global tensors (the full tensors, before the grid cuts them) in safetensors files:

    checkpoints/step_100/
        rank_00000.safetensors      the parts that process 0 wrote
        …
        layout.json                 which file has which part of which tensor
        state.json                  step, model sizes, random state
        manifest-<checksum>.json    size and checksum of every other file

Tensors are named `model.<name>`, `optimizer.<moment>.<name>`, and `average.<name>`. A checkpoint is written under a
temporary name. When every process has written its file, rank 0 *publishes* the checkpoint: it renames the folder. So a
checkpoint is complete, or it does not exist. While saving, the processes send no tensors to each other. They exchange
only the layout, and the sizes and checksums of their files.
"""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from fourfold.checkpoints.compatible import check_can_resume, check_has_model, check_same_model
from fourfold.checkpoints.disk_space import check_room
from fourfold.checkpoints.file_layout import CheckpointTensors, write_layout
from fourfold.checkpoints.find_checkpoints import best_checkpoint, list_checkpoints, mark_best, step_of
from fourfold.checkpoints.global_tensors import (
    AveragedWeights,
    TrainingState,
    check_finite,
    fill_second_copies,
    layout_of,
    trained_parts,
    weight_parts,
)
from fourfold.checkpoints.integrity import ELSEWHERE, DamagedCheckpoint, seal
from fourfold.checkpoints.leftover_checkpoints import remove, remove_unfinished
from fourfold.checkpoints.rank_files import entries_of, gather_written, read_parts, write_file
from fourfold.checkpoints.saved_state import CheckpointState, StreamPosition, read_state, state_of, write_state
from fourfold.checkpoints.verify import shapes_of, verified
from fourfold.config.run import CheckpointConfig
from fourfold.data.atomic_files import WriteFailed, flush, swap_in, writing
from fourfold.errors import UserError
from fourfold.models.tensor_files import Written
from fourfold.parallel.grid.shared_failure import decided_by_rank_0, failing_together, true_on_any_rank
from fourfold.parallel.memory.offload import CopyStream
from fourfold.parallel.state import LocalShard

Write = Callable[[], Written | None]
"""Writes this process's file, or waits until an asynchronous save has written it. Returns the file's size and checksum.
"""
Finish = Callable[[Write], None]


@dataclass(eq=False)
class Checkpointer:
    """Saves a job to a folder, and removes old checkpoints there.

    Args:
        folder: Folder of the run's checkpoints.
        job: The job to save: the model on the grid, with its optimizer.
        config: The section [checkpoint] of the run file.
        stream_position: Function that returns the position in a streamed dataset after a given number of steps. Every
            process calls it.
        first_samples: Digests that reveal whether the data on disk has changed (`Corpora.first_samples`).
    """

    folder: Path
    job: TrainingState
    config: CheckpointConfig
    stream_position: Callable[[int], StreamPosition | None] = lambda step: None
    first_samples: dict[str, str] | None = None
    newest: Path | None = field(default=None, init=False)
    """The newest complete checkpoint that the run saved or loaded. Call `wait` first to include asynchronous saves."""

    def __post_init__(self) -> None:
        self._pending: tuple[Finish, Future[Written | None]] | None = None
        self._beside = ThreadPoolExecutor(1) if self.config.async_mode == "async" else None
        self._copies = CopyStream(self.job.device) if self._beside is not None else None

    def save(self, step: int, required: bool = True, prune: bool = True) -> None:
        """Write the checkpoint `step_<step>`.

        With `checkpoint.async_mode = "async"`, this method only starts to write. A later call of `poll` or `wait`
        publishes the checkpoint when it is complete.

        Args:
            step: Number of finished steps.
            required: Whether a failed write must raise an error. If False, `checkpoint.on_failed_save` decides.
            prune: Whether to remove older checkpoints. After a bad step (`RecentSteps`), a run may still need them.

        Raises:
            UserError: Weights or optimizer states are NaN or infinite. All processes raise this.
            WriteFailed: The checkpoint cannot be written, and `required` is True or `checkpoint.on_failed_save` is
                "stop".
        """
        self.wait(required=False)
        with self._allowed_to_fail(required):
            self._save(step, prune)

    def poll(self) -> None:
        """If all processes have finished an asynchronous save, publish the checkpoint. Otherwise do nothing."""
        if self._pending is not None:
            is_unfinished = not self._pending[1].done()
            if not true_on_any_rank(is_unfinished, torch.device(self.job.grid.device_type), "asynchronous save"):
                self.wait(required=False)

    def wait(self, required: bool = True) -> None:
        """Wait until an asynchronous save is complete, and publish the checkpoint.

        Args:
            required: Whether a failed write must raise an error (see `save`).
        """
        if self._pending is None:
            return
        (finish, written), self._pending = self._pending, None
        with self._allowed_to_fail(required):
            finish(written.result)

    def _save(self, step: int, prune: bool) -> None:
        averaged = self.job.average is not None and self.job.average.has_begun
        parts = trained_parts(self.job, averaged)
        check_finite(parts, step, self.folder)
        per_node = self.job.run.overlap.shards_per_node
        layout, folder = layout_of(parts, self.job.grid, per_node), self._partial(step)
        with failing_together():
            if dist.get_rank() == 0:
                remove_unfinished(self.folder)
                check_room(self.folder, self.job.run)
                with writing(folder):
                    folder.mkdir(parents=True)
        scale = self.job.loss_scale
        state = state_of(self.job.run, step)
        state.optimizer_steps = self.job.optimizer.steps_taken()
        state.recent = self.job.recent.model_copy(deep=True)
        state.stream, state.first_samples = self.stream_position(step), self.first_samples
        state.best = self.job.best.model_copy()
        state.has_averages = averaged
        state.loss_scale = None if scale is None else (scale.scale, scale.steps_since_change)
        if self.job.expert_load is not None:
            state.expert_rows = self.job.expert_load.rows()
        entries = entries_of(parts, layout, self._copies)
        write = partial(write_file, folder, layout, entries, self._copies)
        finish = partial(self._finish, prune, layout, state)
        if self._beside is None:
            finish(write)
        else:
            self.job.copies = self._copies
            self._pending = (finish, self._beside.submit(write))

    def _partial(self, step: int) -> Path:
        return self.folder / f".step_{step}.partial"

    @contextmanager
    def _allowed_to_fail(self, required: bool) -> Iterator[None]:
        """Turn `WriteFailed` into a warning if both the caller and `checkpoint.on_failed_save` allow it."""
        try:
            yield
        except WriteFailed as failure:
            if required or self.config.on_failed_save == "stop":
                raise
            if dist.get_rank() == 0:
                print(f"warning: {failure}; training continues without this checkpoint", file=sys.stderr)

    def _finish(self, prune: bool, layout: CheckpointTensors, state: CheckpointState, write: Write) -> None:
        """Write this rank's file, and publish the checkpoint.

        When every rank has written its file, rank 0 writes the layout, the state, and the manifest. Then it renames the
        folder, and removes old checkpoints. If this fails on any rank, all ranks raise the error.
        """
        folder, finished = self._partial(state.step), self.folder / f"step_{state.step}"
        try:
            with failing_together(), writing(folder):
                mine = write()
            written = gather_written(mine)
            with failing_together():
                if dist.get_rank() == 0:
                    with writing(folder):
                        write_layout(folder, layout)
                        write_state(folder, state)
                        seal(folder, written)
                        flush(folder)
                        swap_in(folder, finished)
                        # Set the link `best` after every save, because an earlier attempt may have left a link to a
                        # step that this run has not reached yet.
                        best = self.folder / f"step_{state.best.step}"
                        if self.job.run.validation.keep_best and best.is_dir():
                            mark_best(best)
                        flush(self.folder)
        except UserError:
            if dist.get_rank() == 0:
                # The disk may be full, so free the space that the incomplete checkpoint takes.
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self.newest = finished
        if dist.get_rank() == 0 and prune:
            self._prune(state.step)

    def _prune(self, step: int) -> None:
        """Remove the old checkpoints that the settings in [checkpoint] do not keep. `step` is the new checkpoint's
        step."""
        if self.config.keep_latest_k:
            every, best = self.config.keep_every, best_checkpoint(self.folder)
            ours = [path for path in list_checkpoints(self.folder) if step_of(path) <= step]
            for old in ours[: -self.config.keep_latest_k]:
                if (not every or step_of(old) % every) and old.name != best:
                    remove(old)


def set_aside(checkpoint: Path, damage: DamagedCheckpoint) -> Path:
    """Rename a damaged checkpoint, and return the newest of the other checkpoints in the same folder. Every process
    must call this.

    Raises:
        DamagedCheckpoint: There is no other checkpoint. The user must decide whether to start from the beginning.
    """
    complaint = str(damage).removesuffix(ELSEWHERE)

    def rename() -> Path:
        others = [path for path in list_checkpoints(checkpoint.parent) if path != checkpoint]
        if not others:
            raise DamagedCheckpoint(f"{complaint}; there is no other checkpoint in {checkpoint.parent}")
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
        with writing(aside):
            swap_in(checkpoint, aside)
        print(
            f"fourfold: {complaint}; it was renamed to {aside}, and the run resumes from {others[-1]}", file=sys.stderr
        )
        return others[-1]

    return decided_by_rank_0(rename)


def load_newest(path: Path, job: TrainingState, fall_back: bool) -> tuple[Path, int]:
    """Load a checkpoint. With `fall_back`, load another one if the checkpoint is damaged. Every process must call this.

    Args:
        path: The checkpoint to try first.
        job: The job whose weights and other state are loaded.
        fall_back: Whether to rename a damaged checkpoint, and try the newest of the other checkpoints in its folder.

    Returns:
        The loaded checkpoint, and its number of finished steps.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged, and `fall_back` is False or there is no other checkpoint.
        UserError: The checkpoint does not fit the run (see `load_checkpoint`).
    """
    while True:
        try:
            return path, load_checkpoint(path, job)
        except DamagedCheckpoint as damage:
            if not fall_back:
                raise
            path = set_aside(path, damage)


def load_checkpoint(path: Path, job: TrainingState) -> int:
    """Load a job's weights, optimizer states, and all other saved state. Every process must call this.

    Any grid may have written the checkpoint. If the checkpoint is an imported model, this function loads only the
    weights.

    Returns:
        The checkpoint's number of finished steps.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged. Usually the job is unchanged. But if the content of a tensor file
            is damaged, the job's weights are unusable afterwards.
        UserError: The checkpoint has another model, other adapters, another optimizer, or another order of samples. The
            job is unchanged.
    """
    with failing_together():
        state = read_state(path)
        check_can_resume(path, state, job.run)
        generator = state.generator(path)
    if state.weights_only:
        _load_weights(path, job, state)
        return 0
    with verified(path, shapes_of(state)) as layout:
        read_parts(path, layout, trained_parts(job, state.has_averages))
    job.optimizer.set_steps_taken(state.step if state.optimizer_steps is None else state.optimizer_steps)
    job.recent, job.best = state.recent, state.best
    if job.expert_load is not None and state.expert_rows is not None:
        job.expert_load.set_rows(state.expert_rows)
    if job.loss_scale is not None and state.loss_scale is not None:
        job.loss_scale.scale, job.loss_scale.steps_since_change = state.loss_scale
    fill_second_copies(job.shards, lambda index: {"weight": job.shards[index].local})
    fill_second_copies(job.trained, job.optimizer.moments)
    if job.average is not None:
        # The averages begin with the first optimizer update. The checkpoint may be from before this update, so reset
        # the flag.
        job.average.has_begun = False
        if job.optimizer.steps_taken():
            _begin_average(job.trained, job.average, state.has_averages)
    job.publish()
    torch.set_rng_state(generator.get_state())
    return state.step


def _begin_average(trained: Sequence[LocalShard], average: AveragedWeights, is_loaded: bool) -> None:
    if is_loaded:
        fill_second_copies(trained, lambda index: {"average": average.averages[index]})
        average.has_begun = True
    else:  # The checkpoint was saved before the run kept averages.
        average.restart()


def load_sharded_weights(path: Path, job: TrainingState) -> None:
    """Load only a job's weights, not its optimizer states. Every process must call this.

    Any grid may have written the checkpoint.

    Raises:
        DamagedCheckpoint: The checkpoint is damaged.
        UserError: The checkpoint belongs to another model, or has only adapters.
    """
    with failing_together():
        state = read_state(path)
        check_same_model(path, state, job.run.model)
        check_has_model(path, state)
    _load_weights(path, job, state)


def _load_weights(path: Path, job: TrainingState, state: CheckpointState) -> None:
    with verified(path, shapes_of(state)) as layout:
        read_parts(path, layout, weight_parts(job))
    fill_second_copies(job.shards, lambda index: {"weight": job.shards[index].local})
    job.publish()
