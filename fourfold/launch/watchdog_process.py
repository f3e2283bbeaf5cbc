"""Run the watchdog process of a rank: wait for the rank's heartbeats, and report and end the rank if it hangs.

It imports only the standard library and a few small modules of fourfold, so it starts quickly and needs little memory.
"""

from __future__ import annotations

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

from fourfold.data.files import write_whole
from fourfold.exit_codes import HANG, ended_by
from fourfold.heartbeat import Beat, Heartbeat
from fourfold.launch.stop_signals import STOP_SIGNALS
from fourfold.processes import lossy_output

STACK_SIGNAL = signal.SIGQUIT
"""Signal that makes a rank write its stack traces. No scheduler sends it."""

DONE = 0
"""Sent instead of a signal's number when there is nothing left to watch."""

SAME_STOP_SECONDS = 1.0
"""A second signal within this many seconds belongs to the same stop request, delivered twice."""

UNWIND_SECONDS = 5.0
"""Number of seconds that a rank has to exit by itself after a second stop signal."""

REPORT_SECONDS = 20.0
"""Number of seconds to wait for the reports of all ranks before one rank names the silent rank without them."""

STOPPED = "Tt"
"""The kernel's state letters for stopped processes."""

FORMAT = "%Y-%m-%d %H:%M:%S"


class Watch(NamedTuple):
    """The rank to watch, with file descriptors and limits in seconds."""

    heartbeat: int
    stacks: int
    signals: int
    """Pipe with the numbers of the signals that the rank receives. The pipe closes when the rank ends."""
    tell: int
    """Pipe that tells the rank the exit code to use."""
    process: int
    rank: int
    world_size: int
    folder: str
    timeout: float
    startup_timeout: float
    grace: float
    forces: bool
    """Whether to end the rank after a second stop signal, because its launcher does not."""


class HangingRank(NamedTuple):
    """The report of one rank of a job that hangs."""

    rank: int
    host: str
    process: int
    state: str
    """The kernel's state letter: R for running, S for sleeping, D for waiting on a disk, T and t for stopped."""
    step: int
    doing: str
    last_sign: float
    silent_seconds: float
    stacks: list[str]
    steps_begun: int = 0
    signs_of_step: int = 0
    """Number of heartbeats since the step began."""
    entered: dict[str, int] = {}  # noqa: RUF012 (never written to)
    """Number of collectives that the rank has entered, by process group."""


@lossy_output(any_error=True)
def main(watch: Watch) -> None:
    """Watch the rank until it ends, hangs, or does not stop when it should."""
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
        # If the watchdog itself was stopped too, for example by Ctrl-Z, this time does not count as silence.
        silent = silent + min(now - began, 2 * interval) if beat.number == number else 0.0
        number = beat.number
        limit = watch.timeout if beat.steps_begun > 1 else watch.startup_timeout
        if silent >= limit or (silent >= limit / 2 and Path(watch.folder).exists()):
            declare_hang(watch, heart, silent)
            end_rank(watch, HANG)
            return


def _read_signals(descriptor: int, seconds: float) -> set[int] | None:
    """Return the numbers of the signals that arrived within `seconds`. None if the rank has ended."""
    if not select.select([descriptor], [], [], seconds)[0]:
        return set()
    return set(os.read(descriptor, 4096)) or None


def _must_end(stops: list[float], now: float, watch: Watch) -> bool:
    """Return whether the grace period after the first stop signal is over. With `forces`, also return True when
    `UNWIND_SECONDS` have passed since a second stop signal."""
    if not stops:
        return False
    if watch.grace and now - stops[0] >= watch.grace:
        return True
    again = [stop for stop in stops if stop - stops[0] >= SAME_STOP_SECONDS]
    return watch.forces and bool(again) and now - again[0] >= UNWIND_SECONDS


def end_rank(watch: Watch, code: int) -> None:
    """Tell the rank to exit with `code`. Kill the rank if it does not exit within `UNWIND_SECONDS`."""
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
    """Write this rank's report, and make sure that hang.txt names the rank that went silent.

    One rank writes hang.txt, usually rank 0 when it has all reports. All other ranks wait for this file.
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
        # To collect the stacks of a stopped rank, the watchdog resumes it. So first wait for all other reports.
        if report.state in STOPPED:
            _write_report(folder, report._replace(stacks=_collect_stacks(watch)))
    except OSError as error:
        print(f"fourfold: rank {watch.rank} hangs; writing {folder}: {error.strerror}", file=sys.stderr, flush=True)


def describe(reports: list[HangingRank], world_size: int, folder: Path) -> str:
    """Name the rank that went silent, and list what every rank was doing.

    Args:
        reports: Reports of the ranks.
        world_size: Number of ranks.
        folder: Folder of the reports.
    """
    missing = sorted(set(range(world_size)) - {report.rank for report in reports})
    first = find_awaited(reports)
    state = {"T": "; it is stopped", "t": "; a debugger has stopped it", "D": "; it waits for a disk"}
    lines = [
        f"hang: rank {first.rank} of {world_size} (process {first.process} on {first.host}) went silent "
        f"{first.silent_seconds:.0f} s ago at step {first.step}, while: {first.doing}{state.get(first.state, '')}; "
        f"stacks of all ranks are in {folder}"
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

    If ranks are stopped, return one of them. Otherwise return a rank that is behind at least one peer and ahead of no
    peer, or else any rank that is behind a peer. Among several such ranks, prefer the fewest heartbeats in the current
    step. Return the rank that has been silent longest if several ranks remain, or if no rank is behind. Times of
    heartbeats are compared only within one machine, because clocks differ between machines.
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
    """Return whether one rank is in an earlier step than the second rank, or has entered fewer collectives of a
    group that both are in."""
    if one.steps_begun != other.steps_begun:
        return one.steps_begun < other.steps_begun
    return any(count < other.entered.get(group, 0) for group, count in one.entered.items())


def _make_report(watch: Watch, beat: Beat, silent: float) -> HangingRank:
    state = _read_state(watch.process)
    return HangingRank(
        watch.rank,
        socket.gethostname(),
        watch.process,
        state,
        beat.step,
        beat.doing or "starting",
        beat.time or time.time() - silent,
        silent,
        [],
        beat.steps_begun,
        beat.number - beat.signs_before_step,
        beat.entered,
    )


def _write_report(folder: Path, report: HangingRank) -> None:
    write_whole(folder / f"rank_{report.rank:05}.json", json.dumps(report._asdict(), indent=1).encode())


def _read_state(process: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


def _collect_stacks(watch: Watch) -> list[str]:
    """Return the rank's stack traces. The rank writes them when it gets a signal, even in the middle of a
    collective."""
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
