"""The report of a run that is still training: it is rewritten now and then, and reloads itself until training ends."""

from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from command_line import Cli
from recorded_runs import make_run, record
from tiny_corpus import run_file

from fourfold.reports import live_report
from fourfold.reports.live_report import WAIT_PER_WRITING, LiveReport
from fourfold.reports.run_report import write_run_report

if TYPE_CHECKING:
    from playwright.sync_api import Browser

RELOADS = "location.reload"


class Clock:
    """A clock that only moves when a test moves it. Writing a page takes ``writing`` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writing: float = 0.0) -> None:
        self.now = 0.0
        self.pages: list[int | None] = []

        def write(run_dir: Path, reload_seconds: int | None) -> None:
            self.now += writing
            self.pages.append(reload_seconds)

        monkeypatch.setattr(live_report.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(live_report, "write_run_report", write)

    def train(self, report: LiveReport, seconds: int) -> None:
        """Train with one step per second."""
        for step in range(seconds):
            self.now += 1
            report.after_step(step)


def live(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> LiveReport:
    monkeypatch.setattr(live_report.dist, "get_rank", lambda: rank)
    return LiveReport(None, None, None, Path("nowhere"))


def test_the_report_is_rewritten_every_ten_seconds_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    report = live(monkeypatch)
    clock.train(report, 9)
    assert clock.pages == []
    clock.train(report, 21)
    assert clock.pages == [10, 10, 10]
    report.close()
    assert clock.pages == [10, 10, 10, None]


def test_writing_takes_at_most_half_a_percent_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, writing=0.5)
    clock.train(live(monkeypatch), 1000)
    assert clock.pages == [10, 125 * WAIT_PER_WRITING // 250] + [125] * (len(clock.pages) - 2)
    assert 0.5 * len(clock.pages) / clock.now < 0.005


def test_only_the_first_process_writes_and_a_run_of_seconds_has_no_live_report(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    other = live(monkeypatch, rank=1)
    clock.train(other, 100)
    other.close()
    short = live(monkeypatch)
    clock.train(short, 5)
    short.close()
    assert clock.pages == []


def test_a_report_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live_report, "SHORTEST_WAIT", 0.0)
    monkeypatch.setattr(live_report.dist, "get_rank", lambda: 0)
    LiveReport(None, None, None, tmp_path / "missing").after_step(1)
    odd = make_run(tmp_path / "odd", [record(1)])
    (odd / "tasks.jsonl").write_text('{"step": 1}\n')
    LiveReport(None, None, None, odd).after_step(1)
    unreadable = make_run(tmp_path / "unreadable", [record(1)])
    monkeypatch.setattr(Path, "read_bytes", fail_to_read)
    LiveReport(None, None, None, unreadable).after_step(1)
    errors = capsys.readouterr().err.splitlines()
    assert all(line.startswith("warning: the live report was not written: ") for line in errors)
    missing, odd_line, damaged = errors
    assert "does not exist" in missing and "tasks.jsonl, line 1: " in odd_line and "Input/output error" in damaged


def fail_to_read(path: Path) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))


def test_a_run_has_a_live_report_while_it_trains_and_a_final_one_after_it(
    cli: Cli, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def write(run_dir: Path, reload_seconds: int | None = None) -> Path:
        page = write_run_report(run_dir, reload_seconds)
        steps = len((run_dir / "metrics.jsonl").read_text().splitlines())
        written.append((steps, RELOADS in page.read_text()))
        return page

    monkeypatch.setattr(live_report, "SHORTEST_WAIT", 0.0)
    monkeypatch.setattr(live_report, "WAIT_PER_WRITING", 0)
    monkeypatch.setattr(live_report, "write_run_report", write)
    assert cli("train", run_file(tmp_path, prefix, training__train_steps=3))[0] == 0
    assert written == [(1, True), (2, True), (3, True), (3, False)]
    assert RELOADS not in (tmp_path / "runs" / "run" / "report.html").read_text()


def test_a_browser_reloads_the_live_page_and_shows_new_steps(browser: Browser, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [record(1)])
    report = write_run_report(folder, reload_seconds=1)
    page = browser.new_page()
    page.goto(report.as_uri())
    assert "1 step recorded. Training continues" in page.locator(".subtitle").first.inner_text()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record(step)) + "\n" for step in (1, 2)))
    write_run_report(folder)
    page.get_by_text("2 steps recorded").wait_for()
    assert "Training continues" not in page.locator(".subtitle").first.inner_text()
    page.close()


@pytest.mark.parametrize("seconds", [1, 1000])
def test_the_page_of_a_killed_run_stops_reloading(browser: Browser, tmp_path: Path, seconds: int) -> None:
    report = write_run_report(make_run(tmp_path / "run", [record(1)]), reload_seconds=seconds)
    longest = max(3600, 10 * seconds)
    for age, is_stale in ((longest - 60, False), (longest + 60, True)):
        was = re.sub(r"written = \d+", f"written = {time.time() - age:.0f}", report.read_text())
        report.write_text(was)
        page = browser.new_page()
        visits: list[str] = []
        page.on("framenavigated", lambda frame, visits=visits: visits.append(frame.url))
        page.goto(report.as_uri())
        text = page.locator(".subtitle").first.inner_text()
        assert ("no longer reloads itself" in text, "Training continues" in text) == (is_stale, not is_stale)
        if seconds == 1:
            page.wait_for_timeout(2500)
            assert (len(visits) == 1) == is_stale
        page.close()
