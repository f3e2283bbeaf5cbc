"""The names that ``import fourfold`` offers."""

import subprocess
import sys

import pytest

import fourfold
from fourfold.config.run import ParallelConfig


def test_importing_fourfold_does_not_import_torch() -> None:
    code = "import sys, fourfold; dir(fourfold); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


def test_public_names_are_listed_and_found() -> None:
    assert set(fourfold.__all__) <= set(dir(fourfold))
    assert all(hasattr(fourfold, name) for name in fourfold.__all__)
    assert fourfold.ParallelConfig is ParallelConfig
    with pytest.raises(AttributeError, match="no attribute 'Gird'"):
        _ = fourfold.Gird
