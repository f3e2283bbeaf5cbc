"""Give each attempt of a job its own keys in the store that its processes share.

If torchrun restarts a job, the new attempt may use the same store as the earlier attempts.
"""

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # these names are public

POLL_SECONDS = 0.02


def attempt_store(store: Store, rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a view of ``store`` with a key prefix that only the ranks of this attempt know. Every rank of the attempt
    must call this.

    The store still has the keys of earlier attempts. TORCHELASTIC_RESTART_COUNT does not tell attempts apart, because
    each node's torchrun counts only its own restarts (github.com/pytorch/pytorch/issues/135712). So the ranks agree on
    a random name:

    1. Each rank except rank 0 writes a new random word to the store.
    2. Rank 0 answers each word with the attempt's name. It also answers words of earlier attempts, but nobody reads
       those answers.
    3. Each rank reads the answer to its own word. Rank 0 stops when all ranks have read the name.

    Raises:
        DistStoreError: A rank did not arrive before the timeout.
    """
    if rank == 0:
        name = uuid.uuid4().hex
        _answer(store, name, world_size, timeout)
    else:
        word = uuid.uuid4().hex
        store.set(f"/ask/{rank}", word)
        store.wait([f"/answer/{word}"], timeout)
        name = store.get(f"/answer/{word}").decode()
        store.set(f"/taken/{name}/{rank}", "")
    return PrefixStore(f"/attempt/{name}", store)


def _answer(store: Store, name: str, world_size: int, timeout: timedelta) -> None:
    deadline = time.monotonic() + timeout.total_seconds()
    answered: dict[int, bytes] = {}
    waiting = list(range(1, world_size))
    while waiting:
        for rank in waiting:
            if store.check([f"/ask/{rank}"]) and (word := store.get(f"/ask/{rank}")) != answered.get(rank):
                store.set(f"/answer/{word.decode()}", name)
                answered[rank] = word
        waiting = [rank for rank in waiting if not store.check([f"/taken/{name}/{rank}"])]
        if waiting and time.monotonic() > deadline:
            raise dist.DistStoreError(f"ranks {waiting[:10]} did not arrive within {timeout.total_seconds():.0f} s")
        time.sleep(POLL_SECONDS if waiting else 0)
