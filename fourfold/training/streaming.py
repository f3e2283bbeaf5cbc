"""Save and restore the position in a streamed dataset."""

from pathlib import Path
from typing import Any

from fourfold.checkpoints.compatible import changed
from fourfold.checkpoints.saved_state import StreamPosition, read_state
from fourfold.parallel.grid.shared_failure import failing_together, from_all_ranks
from fourfold.training.corpora import Corpora


def stream_position(corpora: Corpora, steps: int) -> StreamPosition | None:
    """Return the position in the streamed dataset after ``steps`` steps, or None if the data is not streamed.

    The dataset is divided into several streams, and the result has the position of each stream. The positions do not
    depend on the grid, so a run can continue on another grid. Every process calls this, because a stream's position is
    known only to the process that read the stream's most recent sample.
    """
    stream = corpora.stream
    if stream is None:
        return None
    mine: dict[int, dict[str, Any]] = {}
    with failing_together():
        last = corpora.train.sample_numbers(steps - 1).reshape(-1).tolist() if steps else []
        mine = stream.positions(steps, last)
    everyone = from_all_ranks(mine, "positions in the data")
    found = {number: position for each in everyone for number, position in each.items()}
    positions = [found[number] for number in range(len(stream.streams))]
    return StreamPosition(
        source=stream.name, text_key=corpora.data.text_key, tokenizer=stream.tokenizer.fingerprint,
        shuffle_buffer=corpora.data.shuffle_buffer, positions=positions,
    )  # fmt: skip


def continue_stream(corpora: Corpora, checkpoint: Path | None, steps: int) -> None:
    """Continue a streamed dataset at the position that a checkpoint has stored. Every process calls this.

    The function does nothing if the data is not streamed, or if there is no checkpoint.

    Args:
        corpora: The run's data.
        checkpoint: The checkpoint that the run resumes from, or None.
        steps: Number of finished steps in the checkpoint.

    Raises:
        UserError: The checkpoint was trained on other data, or with another text column, tokenizer, or shuffle buffer.
    """
    stream = corpora.stream
    if stream is None or checkpoint is None or steps == 0:
        return
    with failing_together():
        saved = read_state(checkpoint).stream
        source, count = (None, 0) if saved is None else (saved.source, len(saved.positions))
        if saved is None or source != stream.name or count != len(stream.streams):
            was = "corpora on disk" if saved is None else f"data.source = '{source}' in {count} streams"
            wanted = f"data.source = '{stream.name}' in {len(stream.streams)} streams"
            raise changed(checkpoint, f"was trained on {was}", wanted)
        for key, before, now in (
            ("text_key", saved.text_key, corpora.data.text_key),
            ("tokenizer", saved.tokenizer, stream.tokenizer.fingerprint),
            ("shuffle_buffer", saved.shuffle_buffer, corpora.data.shuffle_buffer),
        ):
            if before != now:
                raise changed(checkpoint, f"was trained with data.{key} = '{before}'", f"'{now}'")
        stream.go_to(steps, saved.positions)
