"""Output of a run: plain lines in a fixed order for log files, and a live display for people."""

import re
from contextlib import closing
from typing import Any

import pytest

from fourfold.training.console import Progress, format_bytes, format_fact, sparkline
from fourfold.training.metrics import StepMetrics


def step_metrics(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "loss": 2.5,
        "grad_norm": 1.5,
        "lr": 3e-4,
        "tokens": step * 1000,
        "tokens_per_second": 12345.6,
        "model_tflops_per_device": 42.123,
        "mfu": None,
        "peak_memory_bytes": 3 * 2**30,
        "step_seconds": 2.0,
        "trained_token_share": 1.0,
    }
    return StepMetrics(step=step, **{**values, **changes})


def test_a_plain_line_has_a_fixed_order_and_no_control_codes(capsys):
    # This share would be rounded to 100.0%, so it is left out.
    Progress(100, is_tty=False).update(step_metrics(1, trained_token_share=0.9999))
    line = capsys.readouterr().out
    assert line == (
        "step:   1/100  loss:  2.50000  grad_norm:   1.5000  memory: 3.00 GiB  tokens/s: 12,346  tflops: 42.12  "
        "lr: 3.000e-04  eta: 0:03:18\n"
    )


def test_plain_lines_come_once_an_interval(capsys):
    progress = Progress(25, is_tty=False, log_interval=10)
    for step in range(1, 26):
        progress.update(step_metrics(step, more={"validation_loss": 2.0} if step == 17 else {}, mfu=0.4))
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step:")) for line in lines] == [1, 10, 17, 20, 25]
    assert [line for line in lines if "validation_loss: 2.0" in line] == [lines[2]]
    assert all("mfu: 40.00%" in line for line in lines)


def test_eta_follows_the_clock_and_not_the_step_alone(capsys, monkeypatch):
    """Ten seconds pass from one step of two seconds to the next, because an evaluation or a checkpoint takes the
    remaining time."""
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("fourfold.training.console.time.monotonic", lambda: next(clock))
    progress = Progress(13, is_tty=False, log_interval=1)
    for step in (1, 2, 3):
        progress.update(step_metrics(step))
    assert capsys.readouterr().out.splitlines()[-1].endswith("eta: 0:01:40")


def test_a_terminal_of_80_columns_shows_loss_throughput_and_eta(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with closing(Progress(100_000, is_tty=True)) as progress:
        progress.update(step_metrics(1, tokens_per_second=12_345_678.0, step_seconds=59.0))
        progress.close()
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", capsys.readouterr().out).splitlines()
    lines = [line for line in shown if "loss" in line]
    assert lines and all(len(line) <= 80 for line in shown)
    assert all("loss:  2.50000  tokens/s: 12,345,678  eta: 68 days, 6:52:21  grad_norm" in line for line in lines)


def test_a_terminal_of_80_columns_draws_the_recent_losses(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with closing(Progress(100_000, is_tty=True)) as progress:
        for step in range(99_900, 100_001):
            progress.update(step_metrics(step, loss=1e5 - step))
        progress.close()
    shown = re.sub(r"\x1b\[[0-9;?]*\w", "", capsys.readouterr().out).splitlines()
    last = [line.rstrip() for line in shown if "█" in line][-1]
    assert last.endswith(" 100.0% " + sparkline(range(24, 0, -1))) and len(last) <= 80


@pytest.mark.parametrize(
    ("values", "bars"), [([3.0, 2.0, 1.0], "█▅▁"), ([1.0, 1.0], "▁▁"), ([1.0, float("nan"), 8.0], "▁ █"), ([], "")]
)
def test_the_lowest_value_has_the_lowest_bar(values, bars):
    assert sparkline(values) == bars


def test_plain_summaries_are_aligned(capsys):
    progress = Progress(1, is_tty=False)
    progress.print_facts("Run", {"parameters": 1234567, "peak": None})
    progress.print_facts("Done", {"loss": 2.5})
    assert capsys.readouterr().out == "Run\n  parameters  1,234,567\n  peak        n/a\nDone\n  loss  2.5\n"


def test_the_live_display_shows_the_last_state_and_gives_the_terminal_back(capsys):
    with closing(Progress(4, is_tty=True)) as progress:
        progress.print_facts("Run", {"grid": "x2 y2 [not markup]"})
        for step in (1, 2):
            progress.update(step_metrics(step, more={"validation_loss": 2.25} if step == 2 else {}))
        progress.close()
        progress.print_facts("Done", {"tokens": 2000})
    out = capsys.readouterr().out
    assert "[not markup]" in out
    assert "50.0%" in out
    assert "MFU" not in out
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1  # the cursor is hidden and shown again


@pytest.mark.parametrize(
    ("value", "text"), [(None, "n/a"), (1234567, "1,234,567"), (0.123456789, "0.123457"), ("a", "a"), (True, "True")]
)
def test_facts_are_readable(value, text):
    assert format_fact(value) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (2**20 - 1, "1,024.00 KiB"),
        (412.5 * 2**20, "412.50 MiB"),
        (3 * 2**40, "3,072.00 GiB"),
    ],
)
def test_sizes_have_a_unit_of_their_own(size, text):
    assert format_bytes(size) == text


def test_a_slow_device_has_no_zeros(capsys):
    Progress(10, is_tty=False).update(
        step_metrics(1, tokens_per_second=819.0, model_tflops_per_device=4.31e-4, peak_memory_bytes=30 * 2**20)
    )
    line = capsys.readouterr().out
    assert "  memory: 30.00 MiB  tokens/s: 819  gflops: 0.431  lr:" in line
    assert not re.search(r"n/a| 0\.0+\s", line)


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_the_live_display_never_wraps(capsys, monkeypatch, columns):
    """There are two lines, whatever the numbers are. A narrow terminal cuts the last numbers."""
    monkeypatch.setenv("COLUMNS", str(columns))
    last = step_metrics(
        999_999,
        tokens_per_second=12_345_678.0,
        model_tflops_per_device=812.25,
        mfu=0.4123,
        peak_memory_bytes=139 * 2**30,
        trained_token_share=0.98765,
    )
    with closing(Progress(1_000_000, is_tty=True)) as progress:
        progress.update(last)
    lines = [line for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", capsys.readouterr().out).split("\n") if line]
    assert {line.split()[0] for line in lines} == {"step", "loss:"}
    assert max(len(line.rstrip()) for line in lines) <= columns
    if columns >= 80:
        assert all("tokens/s: 12,345,678" in line for line in lines if line.startswith("loss"))
    if columns == 200:
        assert all("tflops: 812.25  mfu: 41.23%" in line for line in lines if line.startswith("loss"))
        assert all(line.rstrip().endswith("trained: 98.8%") for line in lines if line.startswith("loss"))
