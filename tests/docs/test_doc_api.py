"""The API page's examples run in order, and its reference matches the code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from markdown import REPOSITORY, blocks_of
from patience import PATIENCE

PAGE = REPOSITORY / "docs" / "api.md"


@pytest.mark.slow
def test_the_examples_run(workplace: Path) -> None:
    pytest.importorskip("transformers")
    (toml,) = (block for block in blocks_of(PAGE) if block.language == "toml")
    (workplace / "notes.toml").write_text(toml.text, encoding="utf-8")
    examples = [block.text for block in blocks_of(PAGE) if block.language == "python" and "import" in block.text]
    (workplace / "program.py").write_text("\n".join(examples), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=workplace, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr


def test_the_reference_is_that_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PAGE.parent)
    from api import rendered

    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "run python docs/api.py"
