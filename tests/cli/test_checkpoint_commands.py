"""Commands on checkpoints: a checkpoint of another model, a damaged checkpoint, and verification."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Cli, files_in, one_sentence
from safetensors.torch import load_file
from tiny_corpus import run_file


def test_checkpoint_of_another_model(cli: Cli, tmp_path: Path, prefix: str) -> None:
    assert cli("train", run_file(tmp_path, prefix, training__train_steps=1))[0] == 0
    before = files_in(tmp_path / "runs")
    path = run_file(tmp_path, prefix, training__train_steps=1, model__num_hidden_layers=1)
    assert "its model.num_hidden_layers is 2, but the run file has 1" in one_sentence(cli("train", path))
    assert files_in(tmp_path / "runs") == before
    path = run_file(tmp_path, prefix, name="b", model__rope_theta=5.0, checkpoint__resume=f"{tmp_path}/runs/run")
    assert "its model.rope_theta is 10000.0, but the run file has 5.0" in one_sentence(cli("train", path))
    assert files_in(tmp_path / "runs") == before


def scramble_shard(checkpoint: Path) -> None:
    with next(checkpoint.glob("*.safetensors")).open("r+b") as file:
        file.seek(20)
        file.write(b"\xff" * 40)


@pytest.mark.parametrize(
    "damage",
    [
        scramble_shard,
        lambda checkpoint: next(checkpoint.glob("*.safetensors")).unlink(),
        lambda checkpoint: (checkpoint / "state.json").write_text("{"),
    ],
    ids=["scrambled shard", "missing shard", "half a state"],
)
def test_damaged_checkpoint(cli: Cli, tmp_path: Path, prefix: str, damage: Callable[[Path], object]) -> None:
    assert cli("train", run_file(tmp_path, prefix, training__train_steps=1))[0] == 0
    damage(tmp_path / "runs" / "run" / "checkpoints" / "step_1")
    before = files_in(tmp_path / "runs")
    assert "damaged" in one_sentence(cli("train", run_file(tmp_path, prefix)))
    assert files_in(tmp_path / "runs") == before


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "damage", [scramble_shard, lambda path: (path / "state.json").write_text("{")], ids=["shard", "state"]
)
def test_a_run_steps_back_past_a_damaged_checkpoint(
    cli: Cli, tmp_path: Path, prefix: str, damage: Callable[[Path], object]
) -> None:
    """The run resumes from the checkpoint before the damaged one, which is set aside and named. The run ends with the
    same weights."""
    sections = {"checkpoint__interval": 1, "training__train_steps": 3}
    straight = run_file(tmp_path, prefix, name="straight", **sections)
    assert cli("train", straight)[0] == 0
    path, checkpoints = run_file(tmp_path, prefix, **sections), tmp_path / "runs" / "run" / "checkpoints"
    assert cli("train", path)[0] == 0
    damage(checkpoints / "step_3")
    code, _, errors = cli("train", path)
    assert code == 0
    assert (
        f"it was renamed to {checkpoints / 'step_3.damaged'}, and the run resumes from {checkpoints / 'step_2'}"
        in errors
    )
    ends = [tmp_path / "runs" / name / "checkpoints" / "step_3" for name in ("straight", "run")]
    first, second = (load_file(next(end.glob("*.safetensors"))) for end in ends)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def test_checkpoints_are_verified(cli: Cli, tmp_path: Path, prefix: str) -> None:
    assert cli("train", run_file(tmp_path, prefix, checkpoint__interval=1, training__train_steps=2))[0] == 0
    run = tmp_path / "runs" / "run"
    code, output, _ = cli("checkpoint", "verify", run)
    assert code == 0
    assert [line.partition(" is ")[0] for line in output.splitlines()] == [
        str(run / "checkpoints" / f"step_{step}") for step in (1, 2)
    ]
    scramble_shard(run / "checkpoints" / "step_2")
    code, output, _ = cli("checkpoint", "verify", run / "checkpoints" / "step_2")
    assert code == 1
    assert "is damaged" in output
    assert "is not a checkpoint" in one_sentence(cli("checkpoint", "verify", tmp_path))
