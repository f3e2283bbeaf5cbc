"""Run the watchdog process of a rank. If the rank's heartbeats stop, the watchdog writes a report and ends the rank.

This module imports only the standard library and a few small modules of fourfold. So the watchdog starts quickly and
needs little memory.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from fourfold.data.atomic_files import write_whole
from fourfold.exit_codes import HANG, ended_by
from fourfold.heartbeat import Beat, Heartbeat
from fourfold.launch.stop_signals import STOP_SIGNALS
from fourfold.processes import lossy_output

STACK_SIGNAL = signal.SIGQUIT
"""Signal that makes a rank write its stack traces. No scheduler sends this signal."""

DONE = 0
"""The rank sends this number, instead of the number of a signal, when it no longer needs its watchdog."""

SAME_STOP_SECONDS = 1.0
"""A second stop signal within this many seconds is ignored, because a launcher may deliver one signal twice."""

UNWIND_SECONDS = 5.0
"""Number of seconds that a rank gets to exit by itself before its watchdog kills it."""

REPORT_SECONDS = 20.0
"""Number of seconds to wait for the reports of all ranks. After this time, the watchdog uses the reports that exist."""

STOPPED = "Tt"
"""Letters that the kernel uses for the states of stopped processes."""

FORMAT = "%Y-%m-%d %H:%M:%S"


class Watch(NamedTuple):
    """The watchdog's settings: file descriptors, facts about the watched rank, and time limits in seconds."""

    heartbeat: int
    """File descriptor of the memory to which the rank writes its heartbeats."""
    stacks: int
    """File descriptor of the file to which the rank writes its stack traces."""
    signals: int
    """Pipe from which the watchdog reads the numbers of the signals that the rank receives. The pipe closes when the
    rank ends."""
    tell: int
    """Pipe through which the watchdog tells the rank to exit with a given code."""
    process: int
    """Process id of the rank."""
    rank: int
    world_size: int
    folder: str
    """Folder of the reports about a hang."""
    timeout: float
    startup_timeout: float
    grace: float
    forces: bool
    """Whether the watchdog must end the rank after a second stop signal. False if the launcher does this."""


class HangingRank(NamedTuple):
    """The report of one rank in a job that hangs."""

    rank: int
    host: str
    process: int
    state: str
    """The kernel's letter for the process's state: R running, S sleeping, D waiting for a disk, T or t stopped."""
    step: int
    doing: str
    last_sign: float
    """Unix time of the newest heartbeat, in seconds."""
    silent_seconds: float
    """Number of seconds without a new heartbeat, as the watchdog has measured them."""
    stacks: list[str]
    steps_begun: int = 0
    signs_of_step: int = 0
    """Number of heartbeats since the current step began."""
    entered: dict[str, int] = {}  # noqa: RUF012 (never written to)
    """For each process group, how many collectives the rank has entered."""


@lossy_output(any_error=True)
def main(watch: Watch) -> None:
    """Watch the rank until it ends. End it if it hangs, or if it does not stop in time after a stop signal."""
    heart = Heartbeat(watch.heartbeat)
    interval = min(1.0, watch.timeout / 10)
    number, silent = -1, 0.0
    stops: list[float] = []
    while True:
        began = time.monotonic()
        received = _read_signals(watch.signals, interval)
        if received is None or DONE in received or os.getppid() != watch.process:
            return
        now = time.monotonic()
        if not received.isdisjoint(STOP_SIGNALS):
            stops.append(now)
        if _must_end(stops, now, watch):
            end_rank(watch, ended_by(signal.SIGTERM))
            return
        beat = heart.read()
        # Add at most two intervals. If the watchdog itself was stopped (for example, by Ctrl-Z), that time must not
        # count as silence.
        silent = silent + min(now - began, 2 * interval) if beat.number == number else 0.0
        number = beat.number
        limit = watch.timeout if beat.steps_begun > 1 else watch.startup_timeout
        # The folder exists if another watchdog has already found a hang. In this case, half of the limit is enough.
        if silent >= limit or (silent >= limit / 2 and Path(watch.folder).exists()):
            declare_hang(watch, heart, silent)
            end_rank(watch, HANG)
            return


def _read_signals(descriptor: int, seconds: float) -> set[int] | None:
    """Return the numbers of the signals that arrive within `seconds`, or None if the rank has ended."""
    if not select.select([descriptor], [], [], seconds)[0]:
        return set()
    return set(os.read(descriptor, 4096)) or None


def _must_end(stops: list[float], now: float, watch: Watch) -> bool:
    """Return whether the watchdog must end the rank after a stop signal.

    The watchdog must end the rank after the grace period, which begins with the first stop signal. With `watch.forces`,
    it must also end the rank `UNWIND_SECONDS` after a second stop signal.
    """
    if not stops:
        return False
    if watch.grace and now - stops[0] >= watch.grace:
        return True
    again = [stop for stop in stops if stop - stops[0] >= SAME_STOP_SECONDS]
    return watch.forces and bool(again) and now - again[0] >= UNWIND_SECONDS


def end_rank(watch: Watch, code: int) -> None:
    """Tell the rank to exit with `code`. If it does not exit within `UNWIND_SECONDS`, kill it."""
    with contextlib.suppress(BrokenPipeError):
        os.write(watch.tell, bytes([code]))
    with contextlib.suppress(ProcessLookupError):
        os.kill(watch.process, signal.SIGCONT)
        deadline = time.monotonic() + UNWIND_SECONDS
        while time.monotonic() < deadline:
            if os.getppid() != watch.process:
                return
            time.sleep(0.05)
        os.kill(watch.process, signal.SIGKILL)


def declare_hang(watch: Watch, heart: Heartbeat, silent: float) -> None:
    """Write this rank's report, and make sure that hang.txt exists. hang.txt names the rank that went silent.

    Usually the watchdog of rank 0 writes hang.txt when it has the reports of all ranks. All other watchdogs wait for
    this file. If the file does not appear in time, one of them writes it.
    """
    folder = Path(watch.folder)
    verdict = folder / "hang.txt"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report = _make_report(watch, heart.read(), silent)
        if report.state not in STOPPED:
            report = report._replace(stacks=_collect_stacks(watch))
        _write_report(folder, report)
        deadline = time.monotonic() + REPORT_SECONDS + watch.rank / watch.world_size
        while time.monotonic() < deadline and not verdict.exists():
            if watch.rank == 0 and len(_read_reports(folder)) == watch.world_size:
                break
            time.sleep(0.1)
        if not verdict.exists():
            text = describe(_read_reports(folder), watch.world_size, folder)
            write_whole(verdict, text.encode())
            print(f"fourfold: {text}", file=sys.stderr, end="", flush=True)
        # If this rank is stopped, the watchdog must resume it to collect its stacks. A resumed rank changes what other
        # ranks report, so wait for their reports first.
        if report.state in STOPPED:
            _write_report(folder, report._replace(stacks=_collect_stacks(watch)))
    except OSError as error:
        print(f"fourfold: rank {watch.rank} hangs; writing {folder}: {error.strerror}", file=sys.stderr, flush=True)


def describe(reports: list[HangingRank], world_size: int, folder: Path) -> str:
    """Return the text of hang.txt: which rank went silent, and what every rank was doing.

    Args:
        reports: The ranks' reports.
        world_size: Number of ranks.
        folder: Folder of the reports.
    """
    missing = sorted(set(range(world_size)) - {report.rank for report in reports})
    first = find_awaited(reports)
    state = {"T": "; it is stopped", "t": "; a debugger has stopped it", "D": "; it waits for a disk"}
    lines = [
        f"hang: rank {first.rank} of {world_size} (process {first.process} on {first.host}) went silent "
        f"{first.silent_seconds:.0f} s ago at step {first.step}, last action: {first.doing}"
        f"{state.get(first.state, '')}; stacks of all ranks are in {folder}"
    ]
    if missing:
        lines.append(f"no report from {'rank' if len(missing) == 1 else 'ranks'} {', '.join(map(str, missing))}")
    lines += [
        f"rank {report.rank}: step {report.step}, {report.doing}, last sign at "
        f"{time.strftime(FORMAT, time.localtime(report.last_sign))}, state {report.state}"
        for report in reports
    ]
    return "\n".join(lines) + "\n"


def find_awaited(reports: list[HangingRank]) -> HangingRank:
    """Return the rank that all other ranks wait for, directly or indirectly.

    The candidates are the first of these sets that is not empty:

    1. ranks that are stopped
    2. ranks that are behind another rank (`_is_behind`), while no rank is behind them
    3. ranks that are behind another rank
    4. all ranks

    If any rank is behind, keep only the candidates with the fewest heartbeats in the current step. Of the remaining
    candidates, return the rank that has been silent longest. The times of heartbeats on different machines cannot be
    compared, because the machines' clocks differ. So this function first finds the rank with the oldest heartbeat on
    each machine, and then compares how long each of these ranks has been silent.
    """
    stopped = [report for report in reports if report.state in STOPPED]
    behind = [one for one in reports if any(_is_behind(one, other) for other in reports)]
    last = [one for one in behind if not any(_is_behind(other, one) for other in reports)]
    candidates = stopped or last or behind or reports
    fewest = min(report.signs_of_step for report in candidates)
    slowest = [report for report in candidates if not behind or report.signs_of_step == fewest]
    oldest: dict[str, HangingRank] = {}
    for report in sorted(slowest, key=lambda report: report.last_sign):
        oldest.setdefault(report.host, report)
    return max(oldest.values(), key=lambda report: report.silent_seconds)


def _is_behind(one: HangingRank, other: HangingRank) -> bool:
    """Return whether `one` is in an earlier step than `other`. In the same step, return whether `one` has entered fewer
    collectives of a group that both belong to."""
    if one.steps_begun != other.steps_begun:
        return one.steps_begun < other.steps_begun
    return any(count < other.entered.get(group, 0) for group, count in one.entered.items())


def _make_report(watch: Watch, beat: Beat, silent: float) -> HangingRank:
    process = (watch.rank, socket.gethostname(), watch.process, _read_state(watch.process))
    last_sign = (beat.step, beat.doing or "starting", beat.time or time.time() - silent, silent)
    progress = (beat.steps_begun, beat.number - beat.signs_before_step, beat.entered)
    return HangingRank(*process, *last_sign, [], *progress)


def _write_report(folder: Path, report: HangingRank) -> None:
    write_whole(folder / f"rank_{report.rank:05}.json", json.dumps(report._asdict(), indent=1).encode())


def _read_state(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


def _collect_stacks(watch: Watch) -> list[str]:
    """Return the rank's stack traces. A signal makes the rank write them, even in the middle of a collective."""
    os.kill(watch.process, STACK_SIGNAL)
    os.kill(watch.process, signal.SIGCONT)
    size, deadline = -1, time.monotonic() + 2.0
    while time.monotonic() < deadline:
        time.sleep(0.1)
        before, size = size, os.fstat(watch.stacks).st_size
        if size and size == before:
            break
    return os.pread(watch.stacks, 1 << 20, 0).decode(errors="replace").splitlines()


def _read_reports(folder: Path) -> list[HangingRank]:
    return [HangingRank(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("rank_*.json"))]


if __name__ == "__main__":
    main(Watch(**json.loads(sys.argv[1])))
