"""Every command in the documentation runs; those that say that they do not are checked for what can be checked."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from markdown import PAGES, REPOSITORY, Block, blocks_of

from fourfold.cli.app import app
from fourfold.config.run import RunConfig
from fourfold.run_file.load import load_run, make_run

NOT_RUN = "# not run by the tests"

NEEDS = {"loki.md": "transformers", "data.md": "datasets"}
"""Pages whose commands need a library that the tests may do without."""

CHEAPER = {"z = 2\n": "z = 1\n", "seq_length = 128": "seq_length = 32", "max_new_tokens = 20": "max_new_tokens = 2"}
"""Changes to the run files of the pages: fewer processes, shorter sequences."""


def is_run(block: Block) -> bool:
    return block.language == "sh" and not block.text.startswith(NOT_RUN)


def commands_of(block: Block) -> Iterator[list[str]]:
    """The words of every line, continued lines joined; a command inside srun or torchrun begins at its own name."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words[words.index("fourfold") :] if "fourfold" in words else words


STARTS_EMPTY = ("loki.md", "huggingface.md")
"""Pages that make all the files that they name, examples of the repository aside."""

LONG = (
    "README.md",
    "checkpoints.md",
    "data.md",
    "getting-started.md",
    "huggingface.md",
    "loki.md",
    "memorization.md",
    "memory.md",
    "moving.md",
    "planner.md",
    "planning-a-70b.md",
    "preferences.md",
    "tuner.md",
    "validation.md",
)
"""Pages whose commands take more than a few seconds."""


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page.name in LONG else [])
        for page in PAGES
        if any(map(is_run, blocks_of(page)))
    ],
    ids=lambda p: p.name,
)
def test_the_commands_of_a_page_run(page: Path, workplace: Path) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    if page.name in STARTS_EMPTY:
        shutil.rmtree(workplace / "text")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "COV"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    environment["HF_DATASETS_CACHE"] = str(workplace / "cache")
    for block, after in itertools.pairwise([*blocks_of(page), Block("", "")]):
        name = re.match(r"# (\w+\.toml)$", block.text, re.MULTILINE)
        if block.language == "toml" and name:
            content = block.text
            for old, new in CHEAPER.items():
                content = content.replace(old, new)
            (workplace / name[1]).write_text(content, encoding="utf-8")
        if not is_run(block):
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=workplace,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{block.text}\n{done.stdout}"
        if after.language == "text" and "trace" in block.text:
            assert done.stdout.split() == after.text.split()


def test_a_page_that_speaks_of_a_run_file_shows_it() -> None:
    """So that what is run is what is shown."""
    for page in PAGES:
        shown = {name for block in blocks_of(page) for name in re.findall(r"^# (\w+\.toml)$", block.text, re.MULTILINE)}
        for block in filter(is_run, blocks_of(page)):
            used = set(re.findall(r"(?<![\w/-])[\w-]+\.toml", block.text))
            assert used <= shown, f"{page.name}: {used - shown}"


def test_the_run_files_in_the_pages_load() -> None:
    for block in itertools.chain.from_iterable(map(blocks_of, PAGES)):
        if block.language == "toml":
            table = tomllib.loads(block.text)
            if "from_hf" in table.get("model", {}):
                continue  # the commands of its page make the model
            if "training" in table:
                make_run(table)
            else:
                for name, section in table.items():
                    RunConfig.model_fields[name].annotation.model_validate(section)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_exists_and_its_run_file_loads(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for words in itertools.chain.from_iterable(commands_of(b) for b in blocks_of(page) if b.language == "sh"):
        if words[0] == "make":
            assert set(words[1:]) <= set(targets), words
        elif words[0] == "fourfold":
            check_command(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        elif words[0] == "python":
            assert (REPOSITORY / words[1]).is_file(), words


def check_command(words: list[str]) -> None:
    """Parse without running; ``||`` and what follows is the shell's."""
    is_refused = "||" in words
    words = words[: words.index("||")] if is_refused else words
    words = words[: words.index(">")] if ">" in words else words
    if words[0].startswith("--") or words[-1] == "--help":
        words = [word for word in words if not word.startswith("--")]
        assert all(word in typer.main.get_command(app).commands for word in words)
        return
    command = typer.main.get_command(app).commands[words[0]]
    if words[0] == "loki":
        command, words = command.commands[words[1]], words[1:]
    given = command.make_context(words[0], words[1:]).params
    run_file = given.get("run_file")
    if run_file is not None and run_file.parts[0] == "examples" and not is_refused:
        load_run(run_file, given["overrides"])


@pytest.mark.slow
def test_the_trace_in_the_readme_is_what_the_command_prints() -> None:
    blocks = blocks_of(REPOSITORY / "README.md")
    command, shown = next((b, after) for b, after in itertools.pairwise(blocks) if "fourfold trace" in b.text)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-c", command.text], cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    printed = [line.split() for line in done.stdout.splitlines()]
    for line in shown.text.splitlines():
        assert line.strip() == "…" or line.split() in printed, line


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        anchors = {p: headings_of(p) for p in PAGES}
        for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            assert file.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors[file], f"{page.name}: {target}"


def headings_of(page: Path) -> set[str]:
    """The anchors that GitHub makes."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
