"""Progress bars of commands appear only in a terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from tiny_corpus import run_file

from fourfold.data.progress import working

PLAN = ("plan", "--model", "gpt2", "--gpus", "8", "--global-batch", "64", "--json")


def on_terminal(*arguments: object) -> tuple[str, str]:
    """Run ``fourfold`` with a terminal as standard error. Return its standard output and its standard error."""
    outside, inside = os.openpty()
    command = [sys.executable, "-m", "fourfold", *map(str, arguments)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=inside, text=True, env=os.environ | {"TERM": "xterm"}
    )
    os.close(inside)
    shown = b""
    try:
        while part := os.read(outside, 4096):
            shown += part
    except OSError:  # the reading end is closed
        pass
    os.close(outside)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, shown
    return output, shown.decode()


def test_a_search_shows_a_bar_on_a_terminal_and_nothing_in_a_pipe() -> None:
    output, shown = on_terminal(*PLAN)
    assert output.startswith("{") and "Searching layouts" in shown and " of " in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is hidden and shown again
    piped = subprocess.run([sys.executable, "-m", "fourfold", *PLAN], capture_output=True, text=True, check=True)
    assert piped.stdout.startswith("{") and piped.stderr == ""


def test_a_preparation_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words " * 200_000)
    output, shown = on_terminal("prepare", tmp_path / "a.txt", "--out", tmp_path / "c", "--tokenizer", "bytes")
    assert "1,200,001 tokens" in output and "tokenize, MB: 1 of 1" in shown


@pytest.mark.slow
def test_work_in_other_processes_shows_a_bar_too(tmp_path: Path) -> None:
    path = run_file(tmp_path, "/nowhere/corpus", parallel__z=2)
    output, shown = on_terminal("parity", path, "--json", "--steps", "1")
    assert output.startswith('{"ok": true') and "Training on the grid" in shown


def test_only_the_first_process_of_a_launcher_shows_a_bar(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with working("Busy") as watch:
        watch(1, 2)
    assert capfd.readouterr() == ("", "")
