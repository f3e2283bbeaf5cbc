"""Examine a machine, one subject after another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fourfold.doctor.collective_test import examine_collective
from fourfold.doctor.devices import examine_devices, examine_links
from fourfold.doctor.disk import examine_disk
from fourfold.doctor.finding import Finding
from fourfold.doctor.network_interfaces import examine_network
from fourfold.doctor.shared_memory import examine_shared_memory
from fourfold.doctor.versions import examine_versions
from fourfold.environment import read_environment


def examine(folder: Path) -> Iterator[Finding]:
    """Yield findings as soon as they are available. Runs write to ``folder``.

    Under torchrun or srun, the first process of every machine examines its machine. All processes take part in the
    collective test, and the job's first process reports it.
    """
    place = read_environment(os.environ)
    if place is None or place.local_rank == 0:
        yield from examine_versions()
        yield from examine_devices()
        yield from examine_links()
        yield from examine_network(several_machines=place is not None and place.world_size > place.local_world_size)
        yield from examine_shared_memory()
        yield from examine_disk(folder)
    for finding in examine_collective(place):
        if place is None or place.rank == 0:
            yield finding
