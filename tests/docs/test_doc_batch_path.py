"""docs/architecture.md lists the functions that a batch goes through, in the order of their first calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from markdown import PAGES, tables_of
from pool import Pool
from tiny_corpus import run_file

from fourfold.config.run import RunConfig
from fourfold.environment import Place
from fourfold.run_file.load import load_run
from fourfold.training.trainer import train

Call = tuple[str, str]
"""The path of a file in ``fourfold``, and the qualified name of a function in it."""


def first_calls(rank: int, world_size: int, run: RunConfig, wanted: set[Call]) -> list[Call]:
    """Train a run, and return the wanted functions in the order of their first calls, from the first step on."""
    found: list[Call] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        call = (frame.f_code.co_filename.rpartition("/fourfold/")[2], frame.f_code.co_qualname)
        has_begun = bool(found) or call == ("training/trainer.py", "Trainer.train_step")
        if event == "call" and has_begun and call in wanted and call not in found:
            found.append(call)

    sys.setprofile(note)
    try:
        train(Place(rank, rank, world_size, world_size, "local"), run)
    finally:
        sys.setprofile(None)
    return found


def test_a_batch_goes_through_the_functions_of_the_page_in_order(pool: Pool, prefix: str, tmp_path: Path) -> None:
    (page,) = [page for page in PAGES if page.name == "architecture.md"]
    rows = tables_of(page)["step | file | function | what happens there"]
    assert [number for number, *_ in rows] == [str(number) for number in range(1, len(rows) + 1)]
    path = [(file.strip("`"), function.strip("`")) for _, file, function, _ in rows]
    run = load_run(run_file(tmp_path, prefix, parallel__x=2, training__train_steps=1))
    assert pool.run(2, first_calls, run, set(path))[0] == path
