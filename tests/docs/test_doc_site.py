"""The documentation site has every page, and builds without a link or an anchor that leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from markdown import PAGES, REPOSITORY


def test_every_page_is_in_the_navigation() -> None:
    text = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    named = re.findall(r": ([\w-]+\.md)$", text, re.MULTILINE)
    assert sorted(named) == sorted(
        ["index.md", "CHANGELOG.md", *(page.name for page in PAGES if page.name != "README.md")]
    )


@pytest.mark.slow
def test_the_site_builds_strictly_and_reads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="needs fourfold[docs]")
    site = tmp_path / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(site)],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(https?:[^"]+)"', text), page.name
        assert not re.findall(r'<link[^>]* rel="(?:stylesheet|preload)"[^>]* href="(https?:[^"]+)"', text), page.name
