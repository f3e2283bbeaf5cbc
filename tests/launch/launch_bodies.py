"""Programs that the workers of test_launch run. They import torch inside functions, so that they start at once."""

import os
import signal
import sys
import time
from pathlib import Path

from fourfold.environment import Place
from fourfold.errors import UserError

IMPORTED_BY = os.getpid()
LONG = 3600
"""Seconds that a worker sleeps if another process should end it. No test waits this long."""


def who_imported(place: Place) -> tuple[int, int]:
    """Return the process that imported this module, and the process that started this worker."""
    return IMPORTED_BY, os.getppid()


def end_the_starter(place: Place, folder: str) -> None:
    write_process_id(place, folder)
    if place.rank == 0:
        while len(list(Path(folder).glob("?"))) < place.world_size:
            time.sleep(0.01)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(LONG)


def sum_of_ranks(place: Place, scale: float) -> dict[str, object]:
    import torch
    import torch.distributed as dist

    total = torch.tensor([place.rank * scale])
    dist.all_reduce(total)
    print(f"output of rank {place.rank}")
    # Use a single write, so that no other rank's output splits the line.
    os.write(2, f"error of rank {place.rank}\n".encode())
    return {"total": total.item(), "size": dist.get_world_size(), "threads": torch.get_num_threads(), "place": place}


def refuse_on_rank_1(place: Place) -> None:
    import torch
    import torch.distributed as dist

    if place.rank == 1:
        raise UserError("this corpus has no documents")
    dist.all_reduce(torch.ones(1))  # this waits for rank 1, and fails when rank 1 ends


def refuse(place: Place) -> None:
    raise UserError("no")


def crash_on_rank_2(place: Place, folder: str) -> None:
    write_process_id(place, folder)
    if place.rank == 2:
        raise ZeroDivisionError("rank 2 divides by zero")
    time.sleep(LONG)


def be_killed(place: Place) -> None:
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(LONG)


def leave(place: Place) -> None:
    sys.exit(5)


def sleep(place: Place, folder: str) -> None:
    write_process_id(place, folder)
    time.sleep(LONG)


class InterruptedStart:
    """An argument that sends a Ctrl-C when it is pickled, which happens while the workers start."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        os.kill(os.getpid(), signal.SIGINT)
        return (InterruptedStart, ())


def have_started(place: Place, argument: object) -> str:
    return "ran to its end"


def save_at_sigterm(place: Place, folder: str) -> str:
    write_process_id(place, folder)
    return saved_at_sigterm(place, folder)


class StoppedStart:
    """An argument that sends a SIGTERM when it is pickled, which happens while the workers start."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        os.kill(os.getpid(), signal.SIGTERM)
        return (StoppedStart, ())


def saved_at_sigterm(place: Place, argument: object) -> str:
    signal.sigwait({signal.SIGTERM})
    return "saved"


def write_process_id(place: Place, folder: str) -> None:
    """Write the process id to a file named after the rank. The file is complete as soon as it exists."""
    part = Path(folder, f"{place.rank}.part")
    part.write_text(str(os.getpid()))
    part.rename(Path(folder, str(place.rank)))
