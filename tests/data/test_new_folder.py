"""A new folder appears only when it is complete, and a process may open enough files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fourfold.data.atomic_files import new_folder, temporary_name
from fourfold.errors import UserError
from fourfold.processes import raise_file_limit


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="half"), new_folder(tmp_path / "models" / "model") as unfinished:
        (unfinished / "weights").write_text("half")
        raise UserError("half")
    assert list((tmp_path / "models").iterdir()) == []


def test_what_a_killed_process_left_is_no_obstacle(tmp_path: Path) -> None:
    temporary_name(tmp_path / "model").mkdir()
    with new_folder(tmp_path / "model") as folder:
        (folder / "file").write_text("new")
    assert (tmp_path / "model" / "file").read_text() == "new"


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
