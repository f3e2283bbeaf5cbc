"""Full disks, on small real file systems: the message, the files left behind, and whether training continues."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from patience import PATIENCE
from pool import Pool
from saved_jobs import equal, new_job, tensors_of, train
from tiny_corpus import run_file
from tiny_runs import GPT, LLAMA, tiny_run

from fourfold.checkpoints import checkpoint
from fourfold.checkpoints.checkpoint import Checkpointer, load_checkpoint
from fourfold.checkpoints.disk_space import check_room_at_start, checkpoint_bytes, free_bytes
from fourfold.checkpoints.leftover_checkpoints import tidy
from fourfold.config.run import CheckpointConfig, RunConfig
from fourfold.data.atomic_files import WriteFailed
from fourfold.run_file.load import load_run
from fourfold.training.metrics import read_metrics

Disk = Callable[[int], Path]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """Make a file system of this size. Skip the test if this user may not mount one."""
    mounted: list[Path] = []

    def make(size: int) -> Path:
        folder = tmp_path / f"disk-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            pytest.skip("there is no mount")
        if done.returncode:
            pytest.skip(f"cannot mount: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Fill a disk until this many bytes are free."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(max(0, free_bytes(folder) - leave)))
    return ballast


def saved_on_a_disk_that_fills(
    rank: int, world_size: int, run: RunConfig, folder: Path, share: float, mode: str, required: bool
) -> tuple[str, list[str], bool]:
    """Fill the disk while step 2 is saved. Return the error, the files left behind, and whether step 3 can be saved."""
    job = new_job(run)
    train(job, range(1))
    checkpointer = Checkpointer(folder / "checkpoints", job, CheckpointConfig(async_mode=mode, keep_latest_k=0))
    checkpointer.save(1)
    checkpointer.wait()
    ballast = folder / "ballast"
    if rank == 0:
        fill(folder, int(share * sum(file.stat().st_size for file in checkpointer.newest.iterdir())))
    train(job, range(1, 2))
    message = ""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoint, "check_room", lambda *_: None)  # the disk fills up only after the check
        try:
            checkpointer.save(2, required)
            checkpointer.wait(required)
        except WriteFailed as failure:
            message = str(failure)
    left = sorted(path.name for path in checkpointer.folder.iterdir())
    train(job, range(2, 3))
    dist.barrier()
    if rank == 0:
        ballast.unlink()
    checkpointer.save(3)
    checkpointer.wait()
    resumed = new_job(run, initialized=False)
    load_checkpoint(checkpointer.newest, resumed)
    return message, left, equal(tensors_of(resumed), tensors_of(job)) and checkpointer.newest.name == "step_3"


POINTS = [0.995, 0.5, 0.0, *(n / 20 for n in range(1, 10)), *(n / 20 for n in range(11, 19))]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("share", POINTS)
def test_a_disk_that_fills_during_a_save_is_reported(pool: Pool, disk: Disk, share: float) -> None:
    """At 20 points, from the first byte to the manifest, all ranks report the full disk and continue."""
    number = POINTS.index(share)
    grid = [{"x": 2}, {"z": 2}, {"pp": 2}][number % 3]
    run, required = tiny_run(LLAMA, grid), number % 2 == 0
    folder, mode = disk(8 * checkpoint_bytes(run)), ["disabled", "async"][number // 2 % 2]
    answers = pool.run(2, saved_on_a_disk_that_fills, run, folder, share, mode, required)
    assert len({message for message, _, _ in answers}) == 1
    message = answers[0][0]
    if required:
        assert (
            message == f"cannot write the checkpoint {folder}/checkpoints/.step_2.partial: No space left on device"
            or (message.startswith(f"cannot write {folder}/checkpoints/.step_2.partial: No space left on device; free"))
        )
    else:
        assert message == ""  # there is only a warning on standard error
    assert answers[0][1] == ["step_1"]
    assert all(goes_on for _, _, goes_on in answers)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 2}}, {"training": {"precision": "bf16"}}], ids=str)
@pytest.mark.parametrize("model", [LLAMA, GPT], ids=["llama", "gpt tied"])
def test_the_predicted_checkpoint_size_is_right(
    tmp_path: Path, pool: Pool, model: dict[str, Any], changes: dict[str, Any]
) -> None:
    """The prediction differs from the real size only by the bytes that it reserves for names."""
    run = tiny_run(model, {"x": 2}, **changes)
    written = pool.run(2, bytes_written, run, tmp_path)[0]
    assert written <= checkpoint_bytes(run) < 1.1 * written + 64 * 1024


def bytes_written(rank: int, world_size: int, run: RunConfig, folder: Path) -> int:
    checkpointer = Checkpointer(folder, new_job(run), CheckpointConfig())
    checkpointer.save(1)
    return sum(file.stat().st_size for file in checkpointer.newest.iterdir())


def fourfold(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "import sys; from fourfold.cli.app import main; sys.argv[0] = 'fourfold'; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["warn", "stop"])
def test_a_run_on_a_small_disk_warns_or_fails(tmp_path: Path, prefix: str, disk: Disk, choice: str) -> None:
    """One checkpoint fits on the disk, but not two. With 'warn', the second save causes a warning and the last save an
    error. With 'stop', the second save is an error.
    """
    changes = {"parallel__x": 2, "checkpoint__interval": 2, "checkpoint__keep_latest_k": 1}
    path = run_file(tmp_path, prefix, training__train_steps=6, **changes, checkpoint__on_failed_save=choice)
    size = checkpoint_bytes(load_run(path))
    folder = disk(int(1.5 * size))
    done = fourfold("train", path, "--set", f"output_dir={folder}")
    *before, sentence = done.stderr.splitlines()
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert sentence.startswith("fourfold: a checkpoint needs 1.7"), done.stderr
    assert sum("training continues without this checkpoint" in line for line in before) == (choice == "warn")
    assert [path.name for path in (folder / "run" / "checkpoints").iterdir()] == ["step_2"]
    assert read_metrics(folder / "run" / "metrics.jsonl")[-1]["step"] == (6 if choice == "warn" else 4)


@pytest.mark.slow
def test_a_disk_without_room_for_one_checkpoint_is_refused_at_the_start(
    tmp_path: Path, prefix: str, disk: Disk
) -> None:
    path = run_file(tmp_path, prefix, output_dir=str(disk(3 << 19)))
    done = fourfold("train", path)
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert "a checkpoint needs 1.7" in sentence and "has space for 1.5" in sentence
    done = fourfold("train", path, "--set", "checkpoint.save_last=false", "--set", "training.train_steps=2")
    assert done.returncode == 0, done.stderr


def test_a_run_that_saves_needs_room_for_one_checkpoint(tmp_path: Path, disk: Disk) -> None:
    """Half-written checkpoints are removed before the check."""
    run = tiny_run(checkpoint={"interval": 1})
    folder = disk(int(1.5 * checkpoint_bytes(run)))
    (folder / ".step_3.partial").mkdir()
    (folder / ".step_3.partial" / "part").write_bytes(bytes(checkpoint_bytes(run)))
    tidy(folder)
    check_room_at_start(folder, run)
    assert list(folder.iterdir()) == []
    fill(folder, checkpoint_bytes(run) // 2)
    with pytest.raises(WriteFailed, match="a checkpoint needs"):
        check_room_at_start(folder, run)
    never = CheckpointConfig(interval=run.training.train_steps + 1, save_last=False)
    check_room_at_start(folder, run.model_copy(update={"checkpoint": never}))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"parallel__x": 2}, {}], ids=str)
def test_a_full_run_folder_is_reported_in_one_sentence(
    tmp_path: Path, prefix: str, disk: Disk, parallel: dict[str, Any]
) -> None:
    """Any process reports it in one sentence, and no process reports that a peer left."""
    folder = disk(20 * 1024)
    changes = {"checkpoint__save_last": False, "training__train_steps": 300, "output_dir": str(folder), **parallel}
    done = fourfold("train", run_file(tmp_path, prefix, **changes))
    assert done.returncode == 2
    full = f"fourfold: cannot write {folder}/run/metrics.jsonl: No space left on device"
    assert done.stderr == f"{full}; free some space, or choose another path\n"
    steps = [record["step"] for record in read_metrics(folder / "run" / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) > 8


def test_leftovers_of_killed_jobs_are_removed_or_restored(tmp_path: Path) -> None:
    names = (".step_2.partial", ".step_4.removed", ".step_6.replaced", ".step_8.replaced", "step_8")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text(name)
    tidy(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_6", "step_8"]
    assert (tmp_path / "step_6" / "state.json").read_text() == ".step_6.replaced"
    assert (tmp_path / "step_8" / "state.json").read_text() == "step_8"
