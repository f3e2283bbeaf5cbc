"""Test a run's folder in bad conditions: other jobs use it, files are missing or cut off, and checkpoints cannot be
removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import Cli, exit_code
from tiny_corpus import run_file

from fourfold import jobs
from fourfold.checkpoints import leftover_checkpoints
from fourfold.launch.local_workers import WorkerFailed
from fourfold.run_file.load import load_run
from fourfold.training.attempts import count_starts, note_end, note_start
from fourfold.training.bad_steps import BAD_STEPS_FILE
from fourfold.training.metrics import steps_taken
from fourfold.training.run_folder import ATTEMPTS_FILE, folder_of, open_run_folder


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, prefix: str) -> Path:
    """Return the folder of a run of six steps."""
    folder = tmp_path_factory.mktemp("original")
    assert exit_code("train", run(folder, prefix, 6)) == 0
    return folder / "runs"


@pytest.fixture
def trained(original: Path, tmp_path: Path) -> Path:
    """Return a copy of its checkpoints: step_2, step_4, and step_6."""
    shutil.copytree(original, tmp_path / "runs")
    return tmp_path / "runs" / "run" / "checkpoints"


def run(folder: Path, prefix: str, steps: int, **changes: Any) -> Path:
    saves = {"checkpoint__interval": 2, "checkpoint__keep_latest_k": 3}
    return run_file(folder, prefix, training__train_steps=steps, **saves, **changes)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def lose_the_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def lose_all(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def turn_into_a_file(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.write_text("")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("harm", [lose_the_state, lose_all, turn_into_a_file])
def test_a_checkpoint_that_lost_its_state_is_named_and_set_aside(
    cli: Cli, tmp_path: Path, prefix: str, trained: Path, harm: Any
) -> None:
    harm(trained / "step_6")
    code, output, _ = cli("checkpoint", "verify", trained)
    assert code == 1 and "step_6" in output and "step_4 is undamaged" in output
    code, _, errors = cli("train", run(tmp_path, prefix, 8))
    assert code == 0
    assert f"it was renamed to {trained / 'step_6.damaged'}, and the run resumes from {trained / 'step_4'}" in errors
    assert "resume from another" not in errors
    assert "step_6.damaged" in names(trained)


def test_without_another_checkpoint_the_run_does_not_start_again(
    cli: Cli, tmp_path: Path, prefix: str, trained: Path
) -> None:
    for name in ("step_2", "step_4"):
        shutil.rmtree(trained / name)
    lose_the_state(trained / "step_6")
    code, _, errors = cli("train", run(tmp_path, prefix, 8))
    assert code == 2 and "there is no other checkpoint in" in errors
    assert names(trained) == ["step_6"]


def test_a_flipped_bit_in_the_format_costs_one_checkpoint(cli: Cli, tmp_path: Path, prefix: str, trained: Path) -> None:
    state = trained / "step_6" / "state.json"
    state.write_text(state.read_text().replace('"format": 3', '"format": 7'))
    code, _, errors = cli("train", run(tmp_path, prefix, 8))
    assert code == 0 and "the run resumes from" in errors


def test_a_second_job_changes_nothing(cli: Cli, tmp_path: Path, prefix: str, trained: Path) -> None:
    lose_the_state(trained / "step_6")
    (trained / ".step_8.partial").mkdir()
    before = names(trained)
    with open_run_folder(trained.parent):
        code, _, errors = cli("train", run(tmp_path, prefix, 8))
    assert (code, errors.count("\n")) == (2, 1) and "another job is training" in errors
    assert names(trained) == before


def test_a_checkpoint_whose_renaming_was_interrupted_is_resumed_from(
    cli: Cli, tmp_path: Path, prefix: str, trained: Path
) -> None:
    (trained / "step_6").rename(trained / ".step_6.replaced")
    code, output, _ = cli("train", run(tmp_path, prefix, 8))
    assert code == 0
    assert [line.split()[-1] for line in output.splitlines() if "starts at step" in line] == ["6"]


def test_a_checkpoint_that_cannot_be_removed_causes_a_warning(
    cli: Cli, tmp_path: Path, prefix: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trained / "step_2").rename(tmp_path / "elsewhere")
    (trained / "step_2").symlink_to(tmp_path / "elsewhere")

    def refuse(path: Path, **_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(leftover_checkpoints, "rmtree", refuse)
    code, _, errors = cli("train", run(tmp_path, prefix, 10))
    assert code == 0
    assert f"warning: cannot remove the old checkpoint {trained / 'step_4'}: Operation not permitted" in errors
    assert {"step_6", "step_8", "step_10"} <= set(names(trained)) and "step_2" not in names(trained)
    assert (tmp_path / "elsewhere" / "state.json").is_file()


def test_bad_steps_do_not_prune_what_was_saved_before_them(cli: Cli, tmp_path: Path, prefix: str) -> None:
    """The first step ruins all weights, so all later steps are bad. Then the run removes no older checkpoint."""
    changes = {"optimizer__lr": 1e30, "lr_scheduler__warmup_steps": 0, "checks__non_finite": "skip"}
    path = run(tmp_path, prefix, 30, checks__max_in_a_row=8, **changes)
    assert cli("train", path)[0] == 2
    assert names(tmp_path / "runs" / "run" / "checkpoints") == ["step_2", "step_4", "step_6", "step_8"]


def test_a_torn_line_does_not_keep_a_run_from_starting(tmp_path: Path, prefix: str) -> None:
    file, config = tmp_path / ATTEMPTS_FILE, load_run(run(tmp_path, prefix, 8))
    file.write_text('{"restarts": 1, "ste')
    note_start(tmp_path, 1, config, 0)
    note_end(tmp_path)
    assert file.read_text().splitlines()[1:] == [
        '{"restarts": 1, "steps_taken": 0, "first_step": 0}',
        '{"ended": true}',
    ]


DAMAGED = {
    f'{{"step": 2, "skips": {skips}}}': f": skips = {skips} must be a list of steps, such as [2]"
    for skips in ("5", '"2"', "null", "[2.5]", "[[2]]", "[true]")
} | {f'{{"step": {step}, "skips": [2]}}': ' is not an object with an integer "step"' for step in ("true", "2.0", '"2"')}


@pytest.mark.parametrize("line", DAMAGED)
def test_a_damaged_record_of_bad_steps_is_named_before_the_first_step(
    cli: Cli, tmp_path: Path, prefix: str, line: str
) -> None:
    path = run(tmp_path, prefix, 2)
    record = tmp_path / "runs" / "run" / BAD_STEPS_FILE
    record.parent.mkdir(parents=True)
    record.write_text(f'{{"step": 3, "action": "skip"}}\n{line}\n')
    code, _, errors = cli("train", path)
    assert code == 2
    assert errors.splitlines()[-1] == f"fourfold: {record}, line 2{DAMAGED[line]}: fix or delete that line."
    assert steps_taken(record.parent) == 0


def test_a_line_nested_too_deeply_does_not_keep_a_run_from_starting(tmp_path: Path, prefix: str) -> None:
    (tmp_path / ATTEMPTS_FILE).write_text("[" * 100_000 + "\n" + '{"restarts": 0, "steps_taken": 0}\n')
    note_start(tmp_path, 0, load_run(run(tmp_path, prefix, 8)), 0)
    assert count_starts(tmp_path) == 2


@pytest.mark.parametrize("begins_to_train", [True, False])
def test_a_failed_job_starts_again_if_it_had_begun_to_train_whatever_the_clocks_say(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, begins_to_train: bool
) -> None:
    config = load_run(run(tmp_path, prefix, 8, parallel__x=2, fault_tolerance__max_restarts=2))
    folder, outcomes = folder_of(config), ["fails", "ends"]
    folder.mkdir(parents=True)
    note_start(folder, 0, config, 0)  # an earlier job wrote this

    def run_on_grid(*_: object, restarts: int, **__: object) -> str:
        if begins_to_train:
            note_start(folder, restarts, config, 0)
            # Act as if the clock of the file server was behind.
            os.utime(folder / ATTEMPTS_FILE, (0, 0))
        if outcomes.pop(0) == "fails":
            raise WorkerFailed("worker 1 of 2 was ended by SIGKILL")
        return "ended"

    monkeypatch.setattr(jobs, "run_on_grid", run_on_grid)
    if begins_to_train:
        assert jobs.train(config) == "ended"
    else:
        with pytest.raises(WorkerFailed):
            jobs.train(config)
