"""Add files outside of docs/ to the website: README.md as its first page, and the run files that pages link to.

mkdocs calls the functions ``on_…`` of this module, because mkdocs.yml lists it under ``hooks``.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"index.md": "README.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
"""Pages of the website, and the files in the root of the repository that they show."""
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)((?:#[^)\s]*)?)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages in ``PAGES`` and all files in examples/ to the website."""
    for name, source in PAGES.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in sorted((ROOT / "examples").rglob("*.*")):
        if path.suffix in (".toml", ".py", ".json", ".yaml", ".sh"):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository into links to pages of the website."""
    source = ROOT / PAGES[page.file.src_uri] if page.file.src_uri in PAGES else ROOT / "docs" / page.file.src_uri
    return LINK.sub(lambda link: f"]({place_of(source, link[1])}{link[2]})", markdown)


def place_of(source: Path, target: str) -> str:
    """Return the page of the website for the target of a link. For a folder, this is the page of recipes, because pages
    link only to folders with run files."""
    path = (source.parent / target).resolve()
    if path.is_dir():
        return "recipes.md"
    name = path.relative_to(ROOT).as_posix()
    pages = {root_file: site_page for site_page, root_file in PAGES.items()}
    return pages.get(name, name.removeprefix("docs/"))
