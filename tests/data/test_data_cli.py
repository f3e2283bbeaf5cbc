"""Run `fourfold prepare` as a user types it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fourfold.cli.prepare import prepare
from fourfold.data.indexed import IndexedDataset
from fourfold.errors import UserError

app = typer.Typer()
app.command()(prepare)


def test_prepare(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "hello hello hello"}\n{"body": "again hello"}\n' * 20)
    command = [
        str(tmp_path / "a.jsonl"),
        "--out",
        str(tmp_path / "c"),
        "--train-tokenizer",
        "260",
        "--text-key",
        "body",
    ]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0, first.output
    assert f"40 documents, {IndexedDataset(tmp_path / 'c').tokens} tokens, 560 bytes" in first.output
    assert "c-tokenizer.json" in first.output
    second = CliRunner().invoke(app, command)
    assert "Already prepared" in second.output
    assert "Already prepared" not in CliRunner().invoke(app, [*command, "--force"]).output


def test_canaries(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"document {number} is about {number * 37}"}) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows) + "\n")
    command = [str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "c"), "--tokenizer", "bytes", "--canary-tokens", "20"]
    done = CliRunner().invoke(app, [*command, "--canaries", "2", "--repeats", "0,3"])
    assert done.exit_code == 0, done.output
    assert "c-canaries.jsonl" in done.output
    ledger = [json.loads(row) for row in (tmp_path / "c-canaries.jsonl").read_text().splitlines()]
    assert [row["count"] for row in ledger] == [0, 0, 3, 3]
    assert IndexedDataset(tmp_path / "c").documents == 30 - 4 + 6
    kept = f"lower --canaries or --canary-tokens; the tokenized text stays in {tmp_path / 'c.parts'} for the next"
    with pytest.raises(UserError, match=re.escape(kept)):
        CliRunner().invoke(app, [*command, "--canaries", "5000"], catch_exceptions=False)
    with pytest.raises(UserError, match="--canaries is 0"):
        CliRunner().invoke(app, [*command, "--canaries", "0"], catch_exceptions=False)
    with pytest.raises(UserError, match="need --canaries N"):
        CliRunner().invoke(app, [*command, "--repeats", "0,3"], catch_exceptions=False)
    with pytest.raises(UserError, match="--repeats 'often' is not a list of whole numbers; write it as 0,1,4,16"):
        CliRunner().invoke(app, [*command, "--canaries", "2", "--repeats", "often"], catch_exceptions=False)


def test_errors_reach_the_caller(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        CliRunner().invoke(
            app,
            [str(tmp_path / "none.txt"), "--out", str(tmp_path / "c"), "--tokenizer", "bytes"],
            catch_exceptions=False,
        )


def test_the_command_line_starts_without_the_heavy_imports() -> None:
    check = "import sys, fourfold.cli.prepare; assert not {'numpy', 'tokenizers', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_text_only_options_have_their_own_panel() -> None:
    """Options that --format sft and preferences refuse are in a panel of their own."""
    text_only = ("--train-tokenizer", "--text-key", "--workers", "--canaries", "--force")
    _, _, apart = CliRunner().invoke(app, ["--help"]).output.partition("Options of --format text")
    assert [option in apart for option in text_only] == [True] * len(text_only)
    assert "--tokenizer" not in apart.replace("--train-tokenizer", "") and "--eos-token" not in apart
