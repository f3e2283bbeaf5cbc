"""Test trackers: the files that each client writes show what was logged, and a failing client never stops the run."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from patience import PATIENCE, wait_until
from tiny_corpus import run_file

from fourfold.config.run import RunConfig
from fourfold.errors import UserError
from fourfold.launch.job_processes import run_on_grid
from fourfold.run_file.load import load_run
from fourfold.training import tracking
from fourfold.training.metrics import read_metrics
from fourfold.training.tracking import Tracking, check_trackers


class Tracked(NamedTuple):
    """The contents of a tracker's files, which have exactly one run."""

    project: str | None
    name: str | None
    losses: list[tuple[int, float]]
    """Steps and losses, in the order of recording."""
    run_file: Mapping[str, Any]
    """Some or all keys of the resolved run file, as text, by section.key."""


def run_tracked_by(name: str, folder: Path, **changes: Any) -> RunConfig:
    return load_run(run_file(folder, "corpus", **{f"metrics__{name}": True}, metrics__project="tests", **changes))


def folder_of(run: RunConfig) -> Path:
    folder = Path(run.output_dir, run.name)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def track(run: RunConfig, losses: Mapping[int, float], first_step: int = 0) -> None:
    with closing(Tracking(run, folder_of(run), first_step)) as trackers:
        for step, loss in losses.items():
            trackers.log(step, {"step": step, "loss": loss, "mfu": None})


def of_tensorboard(run: RunConfig) -> Tracked:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder_of(run) / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["loss"]
    text = events.Tensors("run file/text_summary")[-1].tensor_proto.string_val[0].decode()
    written = dict(line.strip().split(" = ", 1) for line in text.splitlines() if " = " in line)
    keys = {"training.seq_length": written["seq_length"]}
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    return Tracked(None, None, losses, keys)


def of_wandb(run: RunConfig) -> Tracked:
    from wandb.proto.wandb_internal_pb2 import Record

    losses, runs = [], []
    for file in sorted((folder_of(run) / "wandb").glob("offline-run-*/*.wandb")):
        for content in whole_log(file):
            record = Record.FromString(content)
            if record.HasField("run"):
                runs.append(record.run)
            if record.HasField("history"):
                values = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
                losses.append((int(values["step"]), float(values["loss"])))
    assert len({(each.run_id, each.project, each.display_name) for each in runs}) == 1
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    keys = {"training.seq_length": str(config["training"]["seq_length"])}
    return Tracked(runs[0].project, runs[0].display_name, losses, keys)


def whole_log(file: Path) -> list[bytes]:
    """Return the records of a finished run. W&B's own process may take a moment to write the last of them."""
    from wandb.proto.wandb_internal_pb2 import Record

    def has_end() -> bool:
        return any(Record.FromString(record).HasField("exit") for record in leveldb_records(file.read_bytes()))

    wait_until(has_end)
    return list(leveldb_records(file.read_bytes()))


def leveldb_records(content: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which W&B uses. A part of a record follows each header."""
    assert content[:4] == b":W&B"
    at, whole = 7, b""
    while at + 7 <= len(content):
        # Compute how many bytes are left in this block. No part of a record crosses the end of a block.
        room = 2**15 - at % 2**15
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


READERS: dict[str, Callable[[RunConfig], Tracked]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
}


@pytest.mark.parametrize("name", READERS)
def test_a_tracker_has_one_run_with_every_step_and_the_run_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Steps after the last checkpoint are logged twice. TensorBoard shows only the second copy, and W&B shows both."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    pytest.importorskip(name)
    run = run_tracked_by(name, tmp_path)
    track(run, {1: 4.0, 2: 3.0, 3: 2.5})
    # W&B names folders by the second, so wait for the next name.
    time.sleep(1.1 if name == "wandb" else 0)
    track(run, {3: 2.25, 4: 2.0}, first_step=2)
    warnings = [line for line in capfd.readouterr().err.splitlines() if "no longer records" in line]
    assert warnings == []

    tracked = READERS[name](run)
    assert tracked.project in ("tests", None)
    assert tracked.name in ("run", None)
    first = [(1, 4.0), (2, 3.0)] if name == "tensorboard" else [(1, 4.0), (2, 3.0), (3, 2.5)]
    assert tracked.losses == [*first, (3, 2.25), (4, 2.0)]
    assert tracked.run_file["training.seq_length"] == "32"


def test_a_whole_run_and_its_resumption_are_one_curve(prefix: str, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    changes = {"metrics__tensorboard": True, "checkpoint__interval": 2, "validation__interval": 4}
    for last in (4, 8):
        run = load_run(run_file(tmp_path, prefix, **changes), [f"training.train_steps={last}"])
        run_on_grid("fourfold.training.trainer:train", [run], 1, "cpu")
    events = accumulators.EventAccumulator(str(folder_of(run) / "tensorboard"))
    events.Reload()
    written = read_metrics(folder_of(run) / "metrics.jsonl")
    assert len(written) == 8
    for key in ("loss", "grad_norm", "lr", "tokens", "validation_loss"):
        expected = [(line["step"], pytest.approx(line[key])) for line in written if key in line]
        assert [(event.step, event.value) for event in events.Scalars(key)] == expected
    assert "mfu" not in events.Tags()["scalars"]


class Stubborn:
    """A client that fails when it records step 2, and takes its time to finish if it hangs."""

    def __init__(self, hangs: bool = False) -> None:
        self.steps, self.failed = list[int](), None
        self.released = threading.Event()
        if not hangs:
            self.released.set()

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == 2:
            raise ConnectionError("the network is down")
        self.steps.append(step)

    def finish(self, failed: bool) -> None:
        self.released.wait(PATIENCE)
        self.failed = failed


Made = list[tuple[int, Stubborn]]


def stubborn(folder: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool = False) -> tuple[Tracking, Made]:
    """Return the tracking of a run, and the clients that it makes, with the number of steps before each."""
    made: Made = []

    def client(run: RunConfig, run_dir: Path, first_step: int) -> Stubborn:
        made.append((first_step, Stubborn(hangs)))
        return made[-1][1]

    monkeypatch.setattr(tracking, "CLIENTS", {"wandb": client})
    run = run_tracked_by("wandb", folder)
    return Tracking(run, folder_of(run), 0), made


def test_a_tracker_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers, [(_, client)] = stubborn(tmp_path, monkeypatch)
    for step in (1, 2, 3, 4):
        trackers.log(step, {})
    trackers.close()
    assert (client.steps, client.failed) == ([1], None)
    error = capsys.readouterr().err
    assert error == "warning: wandb no longer records this run: ConnectionError: the network is down\n"


def test_a_tracker_that_cannot_start_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def client(run: RunConfig, run_dir: Path, first_step: int) -> Stubborn:
        raise PermissionError("no key")

    monkeypatch.setattr(tracking, "CLIENTS", {"wandb": client})
    run = run_tracked_by("wandb", tmp_path)
    with closing(Tracking(run, folder_of(run), 0)) as trackers:
        trackers.log(1, {})
    assert capsys.readouterr().err == "warning: wandb no longer records this run: PermissionError: no key\n"


def test_the_end_waits_for_a_slow_tracker_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trackers, [(_, client)] = stubborn(tmp_path, monkeypatch, hangs=True)
    threading.Timer(0.1, client.released.set).start()
    trackers.close(failed=True)
    assert client.failed is True
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(tracking, "FINISH_SECONDS", 0.1)
    trackers, [(_, client)] = stubborn(tmp_path, monkeypatch, hangs=True)
    trackers.close(failed=True)
    assert client.failed is None
    assert capsys.readouterr().err.count("it did not accept the last metrics within 0.1 s") == 1
    client.released.set()


def test_a_roll_back_continues_the_run_from_an_earlier_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackers, made = stubborn(tmp_path, monkeypatch)
    trackers.log(3, {})
    trackers.go_back(1)
    trackers.log(4, {})
    trackers.close()
    assert [(first_step, each.steps, each.failed) for first_step, each in made] == [(0, [3], False), (1, [4], False)]


@pytest.mark.parametrize("name", READERS)
def test_a_missing_library_is_named_with_its_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as error:
        check_trackers(run_tracked_by(name, tmp_path))
    assert str(error.value) == f"metrics.{name} = true needs the {name} library: pip install 'fourfold[{name}]'"
