"""Fixtures of the documentation's tests."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
from markdown import REPOSITORY
from tiny_hub import make_dataset

CALIBRATION = REPOSITORY / "fourfold" / "planning" / "calibration"


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Make a folder with everything that the commands of the pages name."""
    for name in ("examples", "fourfold"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    # Run the page in a copy, because some commands write to the folder.
    shutil.copytree(REPOSITORY / "docs", tmp_path / "docs")
    shutil.copy(REPOSITORY / "docs" / "slingshot_runs.csv", tmp_path / "rows.csv")
    shutil.copy(CALIBRATION / "measured.csv", tmp_path / "others.csv")
    (tmp_path / "text").mkdir()
    for name in ("ast", "enum", "glob"):
        source = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
        for number, part in enumerate(source.split("\n\n\n")):
            (tmp_path / "text" / f"{name}-{number}.txt").write_text(part, encoding="utf-8")
    if importlib.util.find_spec("datasets"):
        make_dataset(tmp_path / "tales", documents=400)
    return tmp_path
