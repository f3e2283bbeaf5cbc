"""Examine a machine, one subject after another."""

import os
from collections.abc import Iterator

from fourfold.doctor.collective_test import examine_collective
from fourfold.doctor.devices import examine_devices
from fourfold.doctor.finding import Finding
from fourfold.doctor.shared_memory import examine_shared_memory
from fourfold.doctor.versions import examine_versions
from fourfold.environment import read_environment


def examine() -> Iterator[Finding]:
    """Examine the machine, and yield each finding as soon as it is available.

    Under torchrun or srun, the first process of every machine examines its machine. All processes take part in the
    collective test, and the job's first process reports it.
    """
    place = read_environment(os.environ)
    if place is None or place.local_rank == 0:
        yield from examine_versions()
        yield from examine_devices()
        yield from examine_shared_memory()
    for finding in examine_collective(place):
        if place is None or place.rank == 0:
            yield finding
