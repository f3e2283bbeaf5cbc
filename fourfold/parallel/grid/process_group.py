"""Start torch's default process group from the launcher's environment variables."""

import atexit
import gc
import os
import sys
import time
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]  # these names are public

from fourfold.environment import Place, read_environment, rendezvous
from fourfold.errors import UserError
from fourfold.parallel.grid.attempt_store import attempt_store
from fourfold.parallel.grid.numa import bind_to_gpu
from fourfold.processes import keep_gloo_local
from fourfold.torch_internals import timeout_of

NVIDIA_SETTINGS = {
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
"""Environment variables that CUDA, NCCL, and torch read when a GPU is first used.

- High priority lets collectives start before computation that is already queued.
- 32 connections (the default is 8) give each stream its own hardware queue. There are streams for the axes, for the
  pipeline's neighbors, and for the computation.
- The workspace makes cuBLAS deterministic. fourfold needs this to run a step twice and compare the results. The
  workspace takes 32 MiB, which torch reserves on Hopper anyway.
- Expandable segments prevent memory fragmentation if tensors have a different size in every step. Examples are
  the tensors with the tokens of an expert, and the tensors for packed documents.
"""

OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}

AMD_SETTINGS = {"TORCH_NCCL_HIGH_PRIORITY": "1", "GPU_MAX_HW_QUEUES": "8"}
"""Environment variables for AMD GPUs. By default, all streams of one priority share 4 hardware queues, and streams in
the same queue run one after another (github.com/pytorch/pytorch/pull/188316). Too many queues are slow too: with 5
streams, 16 queues cost 4 to 14 % of the throughput, and 8 queues cost nothing
(github.com/pytorch/torchtitan/pull/4032)."""

GLOO_RELEASE_SECONDS = 0.2
"""Number of seconds that the process sleeps at exit. In this time, gloo's threads release the tensors of the last
collectives."""


def ensure_process_group(device_type: str, world_size: int) -> None:
    """Start the default process group unless the program has already started it. End it when the program ends.

    torchrun or srun must have started the processes. Only a grid of one process needs no launcher.

    Raises:
        UserError: The grid has several processes, but no launcher started them. Or the processes could not connect, or
            a process has no GPU of its own.
    """
    if dist.is_initialized():
        if device_type == "cuda":
            set_up_gpu()
        return
    place, meeting_point = read_environment(os.environ), None
    if place is not None:
        host, port = rendezvous(os.environ, place)
        meeting_point = f"tcp://{host}:{port}"
    elif world_size == 1:
        place = Place(0, 0, 1, 1, launcher="local")
        keep_gloo_local()
    else:
        raise UserError(
            f"this grid needs {world_size} processes, but no launcher started them; run the program with torchrun "
            f"--nproc-per-node {world_size}, or with srun"
        )
    start_process_group(place, meeting_point, _device(device_type, place), timedelta(minutes=10))
    # Python sets sys.last_value if an exception has ended the program.
    atexit.register(lambda: end_process_group(failed=hasattr(sys, "last_value")))


def start_process_group(place: Place, meeting_point: str | None, device: torch.device, timeout: timedelta) -> None:
    """Start the default group of all processes of the job.

    Args:
        place: This process's position in the job.
        meeting_point: The address at which the processes meet, as in torch's ``init_method``. None for one process.
        device: The device of this process.
        timeout: Longest time that a collective may wait.

    Raises:
        UserError: This process is already in a process group, or it could not connect to the other ranks.
    """
    if dist.is_initialized():
        raise UserError(
            "this process is already in a process group, which a grid or your own code has started; start the job "
            "first, or call torch.distributed.destroy_process_group() before you start the job"
        )
    on_gpu = device.type == "cuda"
    if on_gpu:
        set_up_gpu()
        torch.cuda.set_device(device)
        bind_to_gpu(device)
    try:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",  # On AMD, "nccl" is RCCL.
            init_method=meeting_point if meeting_point is not None and meeting_point.startswith("file:") else None,
            store=_store(meeting_point, place, timeout),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(
            f"rank {place.rank} of {place.world_size} could not meet the other ranks at {meeting_point} "
            f"({str(error).splitlines()[0]}); set MASTER_ADDR and MASTER_PORT to a free port on rank 0's host"
        ) from error
    if not on_gpu:
        # Remove an earlier registration first. A process may start several groups, but the function must run only once.
        atexit.unregister(_let_gloo_release)
        atexit.register(_let_gloo_release)


def set_up_gpu() -> None:
    """Set environment variables for GPUs, except variables that the user has set under a current or an old name.

    The variables have no effect if the program has already used its GPU. In this case, rank 0 prints a warning.
    """
    settings = NVIDIA_SETTINGS if torch.version.hip is None else AMD_SETTINGS
    missing = {
        name: value for name, value in settings.items() if not {name, OLDER_NAMES.get(name, name)} & os.environ.keys()
    }
    os.environ.update(missing)
    if missing and torch.cuda.is_initialized() and (not dist.is_initialized() or dist.get_rank() == 0):
        print(
            f"warning: this program used its GPU before fourfold could set {', '.join(missing)}, so collectives may be "
            "slower and memory may fragment; create the Grid first, or start the program with "
            f"{' '.join(f'{name}={value}' for name, value in missing.items())}",
            file=sys.stderr,
        )


def _store(meeting_point: str | None, place: Place, timeout: timedelta) -> Store | None:
    """Return the store where the processes meet. Return None for a ``file:`` address, because torch opens the file."""
    if meeting_point is None:
        return HashStore()
    url = urlsplit(meeting_point)
    if url.scheme == "file":
        return None
    assert url.hostname is not None and url.port is not None, meeting_point
    of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = place.rank == 0 and not of_agent
    store = TCPStore(url.hostname, url.port, place.world_size, is_server, timeout, multi_tenant=True)
    return attempt_store(store, place.rank, place.world_size, timeout) if of_agent else store


def default_group() -> dist.ProcessGroup:
    """Return the group of all processes. The default process group must have been started."""
    world = dist.group.WORLD
    assert world is not None, "it was started"
    return world


def limit_waiting(group: dist.ProcessGroup, device_type: str) -> None:
    """Give a group the timeout of the default group. A new group has torch's default timeout (30 minutes for gloo)."""
    if dist.get_backend(group) in ("gloo", "nccl"):  # The fake group of ``fourfold trace`` has no timeout.
        group.set_timeout(timeout_of(default_group(), device_type))


def group_among(sets: list[list[int]]) -> dist.ProcessGroup | None:
    """Create a group for each of several disjoint sets of ranks.

    Every process must call this with the same sets.

    Returns:
        The group of this process, or None if this process is in no set.
    """
    # With NCCL, a single call creates all groups.
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        return dist.split_group(split_ranks=sets)
    mine = None
    for ranks in sets:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def warn_of_other_nodes(processes: int) -> None:
    """Warn if the number of processes that the launcher has started per node is not ``processes``."""
    place = read_environment(os.environ)
    started = None if place is None or dist.get_backend() not in ("gloo", "nccl") else place.local_world_size
    if dist.get_rank() == 0 and started not in (None, processes):
        print(
            f"warning: overlap.shards_per_node expects nodes with {processes} processes, but this node "
            f"has {started}; the two levels of gathers and sums do not match the network",
            file=sys.stderr,
        )


def gpu_of(place: Place, gpus: int) -> torch.device:
    """Return this process's GPU. If srun lets each task see only its own GPU, this is GPU 0.

    Raises:
        UserError: Several processes would share a GPU.
    """
    if place.local_world_size > gpus and not (place.launcher == "slurm" and gpus == 1):
        raise UserError(
            f"{place.local_world_size} processes on this machine need a GPU each, but torch sees {gpus}; start {gpus} "
            "per machine (srun --ntasks-per-node, torchrun --nproc-per-node), make [parallel] smaller, or set "
            "training.device = 'cpu'"
        )
    return torch.device("cuda", place.local_rank % gpus)


def _device(device_type: str, place: Place) -> torch.device:
    if device_type != "cuda":
        return torch.device(device_type)
    if not torch.cuda.is_available():
        raise UserError("the grid's device_type 'cuda' needs a GPU, but torch sees none on this machine; use 'cpu'")
    return gpu_of(place, torch.cuda.device_count())


def end_process_group(failed: bool) -> None:
    """Destroy all process groups, except NCCL's groups after a failure.

    After a failure, NCCL would wait for peers that may never answer. So leave its groups until the process ends.

    gloo's groups must always be destroyed. Otherwise one of their threads may release a tensor while the interpreter
    exits. This thread would wait for the GIL and abort the process (github.com/pytorch/pytorch/issues/190489).

    torch has no call that stops these threads. A thread stops when nothing refers to its group any more. Destroying the
    group drops torch's references, but the program's grid may refer to the group until the program exits. So at exit,
    ``_let_gloo_release`` gives the threads time to release their tensors.
    """
    if not dist.is_initialized() or (failed and dist.get_backend() != "gloo" and dist.get_world_size() > 1):
        return
    dist.destroy_process_group()
    # A job has many circular references, which keep its groups alive until the next garbage collection. So collect now.
    gc.collect()


def _let_gloo_release() -> None:
    time.sleep(GLOO_RELEASE_SECONDS)
