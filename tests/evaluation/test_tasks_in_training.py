"""lm-eval tasks at intervals during training have the scores of the run's checkpoints, on the training grid."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import Cli
from pool import Pool
from tiny_corpus import make_corpus, run_file
from tiny_task import Uniform, make_task

from fourfold.data.tokenizer import ByteTokenizer, train_bpe
from fourfold.errors import UserError
from fourfold.evaluation.tasks_in_training import TasksInTraining
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run
from fourfold.training import trainer
from fourfold.training.metrics import add_record, read_metrics

ROWS = [
    {"question": f"shard {i}", "choices": [f" {word} {i}" for word in ("grid", "axis", "tile")], "label": i % 3}
    for i in range(20)
]


def evaluated(folder: Path, tasks: Path, **changes: Any) -> Path:
    if not (folder / "t.json").is_file():
        train_bpe(["grid axis tile shard gather reduce token 1 2 3"] * 20, 300, folder / "t.json")
        make_corpus(folder, tokenizer=str(folder / "t.json"))
    evaluation = {"evaluation__interval": 4, "evaluation__tasks": ["tiny_choice"], "model__vocab_size": 300}
    evaluation |= {"evaluation__include_path": str(tasks), "checkpoint__interval": 4, "training__device": "cpu"}
    return run_file(folder, str(folder / "corpus"), **evaluation | changes)


@pytest.mark.slow
def test_scores_in_training_equal_the_scores_of_its_checkpoints(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    tasks = make_task(tmp_path, ROWS)
    code, _, errors = cli("train", evaluated(tmp_path, tasks, parallel__x=2))
    assert code == 0, errors
    records = read_metrics(tmp_path / "runs" / "run" / "tasks.jsonl")
    assert [record["step"] for record in records] == [4, 8]
    for record in records:
        model = tmp_path / "runs" / "run" / "checkpoints" / f"step_{record['step']}"
        options = ("--tasks", "tiny_choice", "--include-path", tasks, "--json", "--set", "parallel.x=1")
        code, out, errors = cli("evaluate", "--model", model, *options)
        assert code == 0, errors
        found = json.loads(out[out.index("{") :])["tasks"]["tiny_choice"]["acc,none"]
        assert record["tasks"]["tiny_choice"]["acc,none"] == found


def test_a_task_that_is_unknown_ends_a_run_at_its_start(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    path = evaluated(tmp_path, make_task(tmp_path, ROWS), evaluation__tasks=["no_such_task"])
    code, _, errors = cli("train", path)
    assert code == 2 and "task no_such_task: lm-eval has no such task" in errors
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        pytest.param(lambda folder: (folder / "rows.jsonl").unlink(), "FileNotFoundError", id="no dataset"),
        pytest.param(
            lambda folder: edit(folder / "tasks" / "tiny.yaml", "{{label}}", "{{label.nothing.at_all}}"),
            "UndefinedError",
            id="a template of no field",
        ),
    ],
)
def test_a_task_that_fails_ends_a_run_before_its_first_step(
    cli: Cli, tmp_path: Path, spoil: Callable[[Path], None], says: str
) -> None:
    pytest.importorskip("lm_eval")
    path = evaluated(tmp_path, make_task(tmp_path, ROWS))
    spoil(tmp_path)
    code, _, errors = cli("train", path)
    assert code == 2 and f"task tiny_choice: lm-eval cannot run it ({says}" in errors
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_a_task_that_fails_later_costs_its_scores_and_not_the_run(cli: Cli, tmp_path: Path) -> None:
    """The task's template divides by zero in the fourth document. The check before training tries only two documents,
    so it does not find this."""
    pytest.importorskip("lm_eval")
    tasks = make_task(tmp_path, ROWS)
    text = (tasks / "tiny.yaml").read_text().replace("{{question}}", "{{1 // (3 - label3)}}{{question}}")
    (tasks / "fails.yaml").write_text(text.replace("tiny_choice", "fails"))
    rows = [json.dumps({**row, "label3": n}) + "\n" for n, row in enumerate(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    names = {"evaluation__tasks": ["fails", "tiny_choice"], "evaluation__limit": 5}
    code, out, errors = cli("train", evaluated(tmp_path, tasks, parallel__x=2, **names))
    why = "task fails: lm-eval failed (ZeroDivisionError: integer division or modulo by zero)"
    assert code == 0 and "Traceback" not in errors, errors
    for step in (4, 8):
        assert errors.count(f"warning: after step {step}, {why}\n") == 1
    assert errors.count("warning: tasks failed after steps 4, 8; ") == 1
    records = read_metrics(tmp_path / "runs" / "run" / "tasks.jsonl")
    assert [record["failed"] for record in records] == [{"fails": why}] * 2
    assert [set(record["tasks"]) for record in records] == [{"tiny_choice"}] * 2
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_8").is_dir() and "Report: " in out

    model = tmp_path / "runs" / "run"
    code, out, errors = cli("evaluate", "--model", model, "--tasks", "fails,tiny_choice", "--include-path", tasks)
    assert "tiny_choice" in out  # its scores are not lost
    assert code == 2 and errors.strip().endswith(why) and "Traceback" not in errors
    code, out, errors = cli("evaluate", "--model", model, "--tasks", "tiny_choice,nope", "--include-path", tasks)
    assert code == 2 and out == "" and "task nope: lm-eval has no such task" in errors


def test_a_task_that_fails_on_one_process_fails_on_both(pool: Pool, tmp_path: Path) -> None:
    """Only the second process cannot read the data. The first process must learn of this, and not wait in a forward
    pass."""
    pytest.importorskip("lm_eval")
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        folder.mkdir()
        make_task(folder, ROWS)
    (folders[1] / "rows.jsonl").unlink()
    assert pool.run(2, task_of_each, folders) == ["FileNotFoundError"] * 2


def task_of_each(rank: int, world_size: int, folders: list[Path]) -> str:
    from fourfold.evaluation.harness import HarnessModel, TaskFailed

    model = HarnessModel(Uniform(), ByteTokenizer(), prefix=256, context=64)
    with pytest.raises(TaskFailed, match="task tiny_choice: lm-eval failed") as failure:
        model.run_task("tiny_choice", folders[rank] / "tasks", limit=4)
    # The processes are still in step, because another task works.
    model.run_task("tiny_choice", folders[0] / "tasks", limit=4)
    return str(failure.value).partition("(")[2].partition(":")[0]


@pytest.mark.usefixtures("alone")
def test_a_failure_of_the_model_itself_is_not_the_tasks(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    from fourfold.evaluation.harness import HarnessModel

    class OutOfMemory(Uniform):
        def score(self, documents: list[np.ndarray]) -> list[np.ndarray]:
            raise RuntimeError("out of memory")

    model = HarnessModel(OutOfMemory(), ByteTokenizer(), prefix=256, context=64)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.run_task("tiny_choice", make_task(tmp_path, ROWS), limit=4)


@pytest.mark.slow
def test_the_last_evaluation_of_a_run_that_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    losses = [5.0, 4.0, 6.0, 6.0]
    monkeypatch.setattr(trainer, "validate", lambda *_: {"validation_loss": losses.pop(0)})
    early = {"validation__interval": 1, "validation__patience": 2, "training__train_steps": 30}
    run = load_run(
        evaluated(tmp_path, make_task(tmp_path, ROWS), evaluation__interval=25, evaluation__limit=2, **early)
    )
    outcome = run_on_grid("fourfold.training.trainer:train", [run, [TasksInTraining]], 1, "cpu")
    assert outcome.steps == 4
    assert [record["step"] for record in read_metrics(tmp_path / "runs" / "run" / "tasks.jsonl")] == [4]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_interval_and_tasks_go_together(tmp_path: Path) -> None:
    for changes in ({"evaluation__interval": 0}, {"evaluation__tasks": []}):
        with pytest.raises(UserError, match="go together; give both, such as interval = 100"):
            load_run(evaluated(tmp_path, tmp_path, **changes))


def test_records_of_later_steps_are_replaced(tmp_path: Path) -> None:
    for step in (4, 8, 12, 8):
        add_record(tmp_path / "r.jsonl", {"step": step, "tasks": {}})
    assert [record["step"] for record in read_metrics(tmp_path / "r.jsonl")] == [4, 8]
