"""The page with the papers' claims is generated, its commands exist, and its masks obey the drop law."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys

import numpy as np
import pytest
import typer
from markdown import REPOSITORY

from fourfold.cli.app import app
from fourfold.config.loss_masks import GoldfishConfig
from fourfold.data.dataset import Windows
from fourfold.data.goldfish import Goldfish
from fourfold.memorization.goldfish_laws import exact_match_law

DOCS = REPOSITORY / "docs"
sys.path.append(str(DOCS))

import mask_gaps  # noqa: E402 (found through the path added above)
import reproduction  # noqa: E402


def test_the_page_is_what_its_script_writes() -> None:
    assert reproduction.PAGE.read_text(encoding="utf-8") == reproduction.page(), "run: python docs/reproduction.py"


def test_its_commands_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    text = reproduction.PAGE.read_text(encoding="utf-8")
    for command in re.findall(r"`((?:fourfold|python) [^`]+)`", text):
        words = shlex.split(command)
        if words[0] == "fourfold":
            check_options(words[1:])
        elif words[1] == "-m":
            assert importlib.util.find_spec(words[2]), command
        else:
            assert (REPOSITORY / words[1]).is_file(), command
    for path in re.findall(r"`((?:examples|docs|fourfold)/[\w./-]+)`", text):
        assert (REPOSITORY / path).exists(), path


def check_options(words: list[str]) -> None:
    """Check that a command exists and has the named options. Do not check required arguments."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        # `fourfold plan` means `plan layout`, and `fourfold audit` means `audit documents`.
        name = words[0] if words and words[0] in command.commands else next(iter(command.commands))
        command, words = command.commands[name], words[words[:1] == [name] :]
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= options, words


@pytest.mark.parametrize(("k", "h"), [(4, 13), (50, 50)])
def test_passages_without_a_gap_are_counted_and_obey_the_law(k: int, h: int) -> None:
    """The tokens are random, so no text repeats. The published code leaves more passages without a gap than the law
    says, for k = 50 and h = 50."""
    tokens = np.random.default_rng(0).integers(2, 8192, (64, 4097))
    documents = np.broadcast_to(np.arange(4097) // 1000, tokens.shape)
    windows = Windows(tokens, documents, np.arange(64))
    found = {
        strategy: mask_gaps.counts(windows, ~Goldfish(GoldfishConfig(strategy=strategy, k=k, h=h))(windows), k)
        for strategy in ("hash", "hash-table")
    }
    # The first h tokens of a document are never dropped, and documents have 1,000 tokens.
    assert found["hash"]["drop_rate"] * k == pytest.approx(1 - h / 1000, rel=0.05)
    law = exact_match_law(k, 50)
    assert found["hash"]["without_gap"]["50"] == pytest.approx(law, rel=0.15, abs=0.002)
    assert found["hash"]["longest_span"] <= 1000
    if k == 50:
        assert found["hash-table"]["without_gap"]["50"] > 1.15 * law


def test_a_passage_ends_with_its_document() -> None:
    dropped = np.array([[False, False, True, False, False, False]])
    documents = np.array([[0, 0, 0, 0, 1, 1]])
    counted = mask_gaps.without_gap(dropped, dropped.cumsum(axis=1), documents, 2)
    # Of the spans 0-1, 1-2, 2-3, and 4-5, only 0-1 and 4-5 have no dropped token.
    assert counted == pytest.approx(2 / 4)
