"""Tokenize shards in this process or in several processes, and skip completed shards."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from fourfold.data.progress import show_progress
from fourfold.data.shards import Shard, is_done, tokenize
from fourfold.errors import UserError
from fourfold.processes import end_with_parent


def tokenize_all(shards: Sequence[Shard], folder: Path, workers: int) -> None:
    """Tokenize every shard that is not complete in `folder`.

    Shards that were completed before an error are kept.

    Args:
        shards: The shards.
        folder: Folder of the results.
        workers: Maximum number of processes. With 1, this process does all the work.

    Raises:
        UserError: Input cannot be read, a document is too long or does not fit in memory, or a process was killed.
    """
    missing = list({shard.key: shard for shard in shards if not is_done(shard, folder)}.values())
    with show_progress("tokenize", sum(shard.bytes for shard in missing)) as advance:
        _tokenize(missing, folder, min(workers, len(missing)), advance)


def _tokenize(shards: Sequence[Shard], folder: Path, workers: int, advance: Callable[[int], None]) -> None:
    if workers <= 1:
        for shard in shards:
            tokenize(shard, folder)
            advance(shard.bytes)
        return
    # Spawn instead of forking, because threads of torch or a GPU in the caller do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        running = {pool.submit(tokenize, shard, folder): shard for shard in shards}
        try:
            for future in as_completed(running):
                future.result()
                advance(running[future].bytes)
        except BrokenProcessPool as error:
            raise UserError(
                f"a tokenizing process ended early, probably out of memory; finished parts stay in {folder}, so try"
                ' fewer workers (workers=1 if your script has no `if __name__ == "__main__":`)'
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # One process per core is already parallel enough.
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # With the default handler, Ctrl-C ends a worker without a traceback.
    end_with_parent()
