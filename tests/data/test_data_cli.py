"""`fourfold prepare`, as a user types it."""

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


def test_errors_are_left_to_the_caller(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        CliRunner().invoke(
            app,
            [str(tmp_path / "none.txt"), "--out", str(tmp_path / "c"), "--tokenizer", "bytes"],
            catch_exceptions=False,
        )


def test_the_command_line_starts_without_the_heavy_imports() -> None:
    check = "import sys, fourfold.cli.prepare; assert not {'numpy', 'tokenizers', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
