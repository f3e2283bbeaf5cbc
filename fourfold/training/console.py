"""Show a run while it trains: as a live display in a terminal, or as plain lines in a log file."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fourfold.training.metrics import StepMetrics

Fact = str | int | float | None
Facts = Mapping[str, Fact]
"""Lines to print, each with a label and a value."""

# Number of recent steps that the ETA is computed from. With fewer steps, the ETA would jump at each validation. With
# more steps, it would adapt slowly when the speed changes.
_ETA_WINDOW = 50
_BAR_COLUMNS = 24
_SPARKS = "▁▂▃▄▅▆▇█"
# A narrow terminal cuts off the end of the line, so the most important fields come first.
_FIRST_IN_TERMINAL = ("loss", "tokens/s", "eta")


class Progress:
    """Shows the steps of a run on standard output. Only rank 0 creates one.

    In a terminal, a live display has a progress bar, the losses of recent steps as small bars, and a line of metrics.
    In a log file, this class prints a line every `log_interval` steps, and also for the first step, the last step, and
    each step with a validation loss.

    The fields are in torchtitan's order: step, loss, grad_norm, memory, tokens/s, tflops, mfu. After these come lr,
    ETA, and fields that only some steps have. In a terminal, loss, tokens/s, and ETA come first. tokens/s is the sum
    over all devices, and tflops is for one device. mfu is shown only if the device has a published peak.
    """

    def __init__(self, total_steps: int, is_tty: bool | None = None, log_interval: int = 10) -> None:
        """Create the display.

        Args:
            total_steps: Number of steps of the full run.
            is_tty: Whether standard output is a terminal. If None, this method finds out.
            log_interval: Number of steps between two lines in a log file.
        """
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._shown_any = False
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_ETA_WINDOW)
        """The number, the time in seconds, and the loss of each recent step."""
        self._console: Console | None = None
        self._live: Live | None = None
        if sys.stdout.isatty() if is_tty is None else is_tty:
            self._console = Console(force_terminal=True)

    def update(self, metrics: StepMetrics) -> None:
        """Show one finished step."""
        self._recent.append((metrics.step, time.monotonic(), metrics.loss))
        if self._console is not None:
            self._redraw(self._console, metrics)
        elif self._is_due(metrics):
            step = f"step: {metrics.step:>{len(str(self._total_steps))}}/{self._total_steps}"
            print(f"{step}  {self._numbers(metrics)}", flush=True)
        self._shown_any = True

    def close(self) -> None:
        """End the live display. The most recent metrics stay on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _is_due(self, metrics: StepMetrics) -> bool:
        scheduled = metrics.step % self._log_interval == 0 or metrics.step == self._total_steps
        return scheduled or not self._shown_any or "validation_loss" in metrics.more

    def _numbers(self, metrics: StepMetrics, first: tuple[str, ...] = ()) -> str:
        """Return the fields in one line. Fields whose names begin with one of ``first`` come first."""
        tflops = metrics.model_tflops_per_device
        fields = [
            f"loss: {metrics.loss:8.5f}",
            f"grad_norm: {metrics.grad_norm:8.4f}",
            f"memory: {format_bytes(metrics.peak_memory_bytes)}",
            f"tokens/s: {metrics.tokens_per_second:,.0f}",
            f"tflops: {tflops:,.2f}" if tflops >= 1 else f"gflops: {tflops * 1000:.3g}",  # CPUs are below 1 TFLOP/s.
        ]
        if metrics.mfu is not None:
            fields.append(f"mfu: {metrics.mfu:.2%}")
        fields += [f"lr: {metrics.lr:.3e}", f"eta: {self._eta(metrics)}"]
        # Do not show a fraction that would be rounded to 100.0%.
        if metrics.trained_token_share < 0.9995:
            fields.append(f"trained: {metrics.trained_token_share:.1%}")
        if "expert_load" in metrics.more:
            fields.append(f"expert_load: {metrics.more['expert_load']:.2f}")
        if "validation_loss" in metrics.more:
            fields.append(f"validation_loss: {metrics.more['validation_loss']:.5f}")
        return "  ".join(sorted(fields, key=lambda field: not field.startswith(first)))

    def _redraw(self, console: Console, metrics: StepMetrics) -> None:
        if self._live is None:
            self._live = Live(console=console, refresh_per_second=4)
            self._live.start()
        if "validation_loss" in metrics.more:
            console.print(f"step {metrics.step}: validation loss {metrics.more['validation_loss']:.5f}")
        self._live.update(self._live_view(metrics))

    def _live_view(self, metrics: StepMetrics) -> Group:
        bar = Table.grid(padding=(0, 1))
        done = ProgressBar(total=self._total_steps, completed=metrics.step, width=_BAR_COLUMNS)
        step = Text(f"step {metrics.step}/{self._total_steps}", style="bold")
        sparks = Text(sparkline([loss for *_, loss in self._recent][-_BAR_COLUMNS:]))
        bar.add_row(step, done, Text(f"{metrics.step / self._total_steps:.1%}", style="cyan"), sparks)
        return Group(bar, Text(self._numbers(metrics, _FIRST_IN_TERMINAL), no_wrap=True, overflow="ellipsis"))

    def _eta(self, metrics: StepMetrics) -> timedelta:
        """Estimate the time left from the recent steps, including the time for evaluations and checkpoints."""
        (first_step, first_time, _), (last_step, last_time, _) = self._recent[0], self._recent[-1]
        pace = (last_time - first_time) / (last_step - first_step) if last_step > first_step else metrics.step_seconds
        return timedelta(seconds=round(pace * (self._total_steps - metrics.step)))

    def print_facts(self, title: str, facts: Facts) -> None:
        """Print labels and values under a title, above the live display."""
        width = max(map(len, facts), default=0)
        rows = [f"  {label:<{width}}  {format_fact(value)}" for label, value in facts.items()]
        text = "\n".join([title, *rows])
        if self._console is None:
            print(text, flush=True)
        else:
            self._console.print(Text(text))


def sparkline(values: Sequence[float]) -> str:
    """Draw each value as a bar of one character. The lowest value has the lowest bar. Infinity and NaN become
    spaces."""
    finite = [value for value in values if math.isfinite(value)]
    low, height = min(finite, default=0.0), (max(finite, default=0.0) - min(finite, default=0.0)) or 1.0
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(top * (v - low) / height)] if math.isfinite(v) else " " for v in values)


def format_fact(value: str | int | float | None) -> str:
    """Format a value for people to read: with thousands separators, six significant digits, and n/a for None."""
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return str(value) if isinstance(value, str | bool) else f"{value:,}"


def byte_unit(size: float) -> tuple[str, int]:
    """Return the unit that suits a size (GiB, MiB, KiB, or B): the unit's name and its number of bytes."""
    units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
    return next((unit for unit in units if size >= unit[1]), ("B", 1))


def format_bytes(size: float) -> str:
    """Format a size, such as 3.00 GiB or 412.50 MiB."""
    name, unit = byte_unit(size)
    return f"{size / unit:,.{0 if unit == 1 else 2}f} {name}"
