"""A process removes folders that a killed process left behind, but not the folders of a running process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fourfold.data.atomic_files import new_folder, temporary_folder
from fourfold.errors import UserError
from fourfold.processes import raise_file_limit

HOLD = """
import sys
from pathlib import Path
from fourfold.data.atomic_files import new_folder, temporary_folder

with temporary_folder(Path(sys.argv[1]), "job-"), new_folder(Path(sys.argv[1], "model")) as unfinished:
    (unfinished / "weights").write_text("half")
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_folders_of_killed_processes_are_removed_and_folders_in_use_stay(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", HOLD, str(tmp_path)]] * 2
    running, killed = (subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for each in commands)
    try:
        for process in (running, killed):
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        before = {path.name for path in tmp_path.iterdir()}
        assert len(before) == 4
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        with temporary_folder(tmp_path, "job-") as mine:
            left = {path.name for path in tmp_path.glob("job-*")} - {mine.name}
            assert len(left) == 1 and left < before
        with new_folder(tmp_path / "model") as unfinished:
            left = {path.name for path in tmp_path.glob(".model.*.partial")} - {unfinished.name}
            assert len(left) == 1 and left < before
        assert (tmp_path / "model").is_dir()
    finally:
        for process in (running, killed):
            process.kill()
            process.communicate()


def test_folders_of_other_machines_other_names_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with temporary_folder(tmp_path, "job-") as mine:
        link = mine.with_name(mine.name + "-link")
    link.symlink_to(elsewhere)
    (tmp_path / "job-of-mine").mkdir()
    monkeypatch.setattr(platform, "node", lambda: "another machine")
    with temporary_folder(tmp_path, "job-") as theirs:
        pass
    theirs.mkdir()
    monkeypatch.undo()
    with temporary_folder(tmp_path, "job-"):
        pass
    assert set(tmp_path.iterdir()) == {elsewhere, link, tmp_path / "job-of-mine", theirs}


def test_a_folder_has_the_usual_permissions(tmp_path: Path) -> None:
    with new_folder(tmp_path / "model"):
        pass
    (tmp_path / "other").mkdir()
    assert (tmp_path / "model").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_too_low_a_file_limit_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, found: limits.append(found))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 100_000))
    raise_file_limit()
    assert limits == [(4096, 100_000)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 48))
    with pytest.raises(UserError, match=r"may open 48 files, but a job needs 64 or more; .*ulimit -n 4096"):
        raise_file_limit()
