"""Every command in the documentation runs. Commands that cannot run here are checked as far as possible."""

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
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer
from markdown import PAGES, REPOSITORY, Block, blocks_of
from patience import PATIENCE

from fourfold.cli.app import app
from fourfold.config.run import RunConfig
from fourfold.run_file.load import load_run, make_run

NOT_RUN = "# not run by the tests"
LONG_BLOCK = "# takes "
"""A block that begins with this text is run only by a slow test."""

PROGRAMS_ELSEWHERE = ("getting-started.md", "api.md", "parallelize.md", "reliability.md")
"""Pages whose Python programs have their own tests (test_doc_loop.py, test_doc_api.py, and below)."""

NEEDS = {"data.md": "datasets"} | dict.fromkeys(("README.md", "huggingface.md", "loki.md"), "transformers")
"""Pages whose commands need an optional library. Their tests are skipped without it."""

CHEAPER = {"z = 2\n": "z = 1\n", "seq_length = 128": "seq_length = 32", "max_new_tokens = 20": "max_new_tokens = 2"}
"""Changes to the run files of the pages: fewer processes, shorter sequences."""


def is_run(block: Block) -> bool:
    """Return whether a block is a shell block that the tests run. A block is not run if it says so, or if it only calls
    make, whose targets install packages."""
    if block.language != "sh" or block.text.startswith(NOT_RUN):
        return False
    return any(words[0] != "make" for words in commands_of(block))


def is_quick(block: Block) -> bool:
    return is_run(block) and not block.text.startswith(LONG_BLOCK)


def commands_of(block: Block) -> Iterator[list[str]]:
    """Yield the words of every command. Continued lines are joined, and a command in srun or torchrun begins at its own
    name."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words[words.index("fourfold") :] if "fourfold" in words else words


STARTS_EMPTY = ("loki.md", "huggingface.md")
"""Pages that make all the files that they name, except the repository's examples."""

LONG = (
    "CONTRIBUTING.md",
    "README.md",
    "checkpoints.md",
    "data.md",
    "getting-started.md",
    "huggingface.md",
    "loki.md",
    "memorization.md",
    "memory.md",
    "moving.md",
    "optimizers.md",
    "parallelize.md",
    "planner.md",
    "planning-a-70b.md",
    "preferences.md",
    "tuner.md",
    "validation.md",
)
"""Pages whose commands take more than a few seconds."""


WHOLE = [
    page
    for page in PAGES
    if any(is_run(block) and (page.name in LONG or not is_quick(block)) for block in blocks_of(page))
]
"""Pages whose blocks a slow test runs."""
TUTORIALS = ("memorization.md", "parallelize.md")
"""Pages that test_doc_memorization.py and test_doc_loop.py run, because they also check the results."""


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in LONG and any(map(is_quick, blocks_of(page)))],
    ids=lambda p: p.name,
)
def test_the_commands_of_a_page_run(page: Path, workplace: Path) -> None:
    run_page(page, workplace, is_quick)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in WHOLE if page.name not in TUTORIALS], ids=lambda p: p.name)
def test_all_commands_of_a_page_run(page: Path, workplace: Path) -> None:
    run_page(page, workplace, is_run)


def run_page(page: Path, workplace: Path, chosen: Callable[[Block], bool]) -> None:
    """Run the chosen blocks and the programs between them in one folder, one after another."""
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name])
    if page.name in STARTS_EMPTY:
        shutil.rmtree(workplace / "text")
    for block, after in itertools.pairwise([*blocks_of(page), Block("", "")]):
        name = re.match(r"# (\w+\.toml)$", block.text, re.MULTILINE)
        if block.language == "toml" and name:
            content = block.text
            for old, new in CHEAPER.items():
                content = content.replace(old, new)
            (workplace / name[1]).write_text(content, encoding="utf-8")
        if block.language == "python" and page.name not in PROGRAMS_ELSEWHERE:
            run_block([sys.executable, "-c", block.text], workplace)
        if not chosen(block):
            continue
        printed = run_block(["bash", "-euo", "pipefail", "-c", block.text], workplace)
        if after.language == "text" and "trace" in block.text:
            check_printed(printed, after.text)


def run_block(command: list[str], workplace: Path) -> str:
    """Run a block, and return what it prints."""
    done = subprocess.run(
        command,
        cwd=workplace,
        env=environment_in(workplace),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}"
    return done.stdout


def environment_in(workplace: Path) -> dict[str, str]:
    """Return the environment of a user who works in the repository's folder, with separate caches."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM", "COV"))}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "100"}
    return environment | {
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_DATASETS_CACHE": str(workplace / "cache"),
        "XDG_CACHE_HOME": str(workplace / "cache"),
    }


def check_printed(printed: str, shown: str) -> None:
    """Check that the page shows the output, or its first lines if the page ends with an ellipsis."""
    words, expected = printed.split(), shown.split()
    if expected[-1] == "…":
        expected.pop()
        words = words[: len(expected)]
    assert words == expected


@pytest.mark.slow
def test_the_program_that_reads_the_data_of_a_run(workplace: Path) -> None:
    """Run the program of docs/reliability.md on a small version of the run of docs/getting-started.md."""
    page = REPOSITORY / "docs" / "getting-started.md"
    (run_file,) = (block.text for block in blocks_of(page) if block.text.startswith("# notes.toml"))
    (workplace / "notes.toml").write_text(run_file, encoding="utf-8")
    small = ["training.train_steps=1", "parallel.x=1", "parallel.z=1", "training.seq_length=32"]
    run_block(
        [
            "bash",
            "-euc",
            "fourfold prepare text --out corpora/notes --train-tokenizer 1000 --validation-fraction 0.1\n"
            f"fourfold train notes.toml {' '.join(f'--set {key}' for key in small)}",
        ],
        workplace,
    )
    (program,) = (b.text for b in blocks_of(REPOSITORY / "docs" / "reliability.md") if b.language == "python")
    printed = run_block([sys.executable, "-c", f"{program}\nprint(windows.tokens.shape)"], workplace)
    assert printed == "(4, 33)\n"


def test_what_is_not_run_has_a_reason() -> None:
    """There are only a few valid reasons: it installs packages, or it needs a cluster, a GPU, many minutes, or files
    outside the workplace."""
    reasons = (
        "install|downloads packages|a GPU|allocation|GPUs|nodes|supercomputer|cluster|many minutes|into the repository|"
        "start-up"
    )
    for page in PAGES:
        for block in blocks_of(page):
            first = block.text.partition("\n")[0]
            if first.startswith(NOT_RUN):
                assert re.search(reasons, first), f"{page.name}: {first}"


def test_a_page_that_speaks_of_a_run_file_shows_it() -> None:
    """If a page runs a run file, the page shows the file or its commands write the file."""
    for page in PAGES:
        shown = {name for block in blocks_of(page) for name in re.findall(r"^# (\w+\.toml)$", block.text, re.MULTILINE)}
        texts = [block.text for block in blocks_of(page)]
        made = {name for text in texts for name in re.findall(r"(?:--out|--write|cat >) (\w+\.toml)", text)}
        for block in filter(is_run, blocks_of(page)):
            used = set(re.findall(r"(?<![\w/.-])[\w-]+\.toml", block.text))
            assert used <= shown | made, f"{page.name}: {used - shown - made}"


def test_the_run_files_in_the_pages_load() -> None:
    for block in itertools.chain.from_iterable(map(blocks_of, PAGES)):
        if block.language == "toml":
            table = tomllib.loads(block.text)
            if "from_hf" in table.get("model", {}):
                continue  # a command on the page makes this model first
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
            assert {word for word in words[1:] if "=" not in word} <= {*targets}, words
        elif words[0] == "fourfold":
            check_command(words[1:])
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]), words
        elif words[0] == "python":
            assert (REPOSITORY / words[1]).is_file(), words


def check_command(words: list[str]) -> None:
    """Parse a command without running it. Everything after ``||`` belongs to the shell."""
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
    """Return the anchors that GitHub makes for a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
