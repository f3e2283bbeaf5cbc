"""Documents from every kind of file, and one sentence for each file that cannot be read."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from tiny_corpus import documents_of

from fourfold.data.prepare import prepare
from fourfold.data.sources import list_inputs, read_documents
from fourfold.errors import UserError

ROWS = [{"text": "eins"}, {"text": ""}, {"text": "zwei\nzeilen"}, {"text": None}, {"text": "drei ü"}]
TEXTS = ["eins", "zwei\nzeilen", "drei ü"]


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def test_text_and_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n\ndocument")
    (tmp_path / "b.jsonl").write_bytes(jsonl(ROWS) + b"\n")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS)))
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"packed\ntext"))
    assert documents_of([tmp_path]) == ["one\r\n\ndocument", *TEXTS, *TEXTS, "packed\ntext"]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": [row["text"] for row in ROWS], "n": range(len(ROWS))}), path)
    assert list(read_documents(path)) == TEXTS
    with pytest.raises(UserError, match=r'a\.parquet has no column "body" among text, n'):
        list(read_documents(path, "body"))
    with pytest.raises(UserError, match="holds int64"):
        list(read_documents(path, "n"))
    path.write_bytes(b"no parquet at all")
    with pytest.raises(UserError, match="not a Parquet file"):
        list(read_documents(path))


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs the pyarrow library: pip install 'fourfold\[parquet\]'"):
        list(read_documents(tmp_path / "a.parquet"))


def test_inputs_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden/d.txt", "ignored.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents_of([tmp_path]) == ["a.txt", "b.txt", "sub/c.txt"]
    assert documents_of([tmp_path / "b.txt", f"{tmp_path}/a*"]) == ["b.txt", "a.txt"]
    assert documents_of([f"{tmp_path}/**/c.txt"]) == ["sub/c.txt"]
    for item, message in (
        ("none.txt", "does not exist"),
        ("x*", "no supported file"),
        ("ignored.bin", "unsupported suffix"),
    ):
        with pytest.raises(UserError, match=message):
            list_inputs([tmp_path / item])
    with pytest.raises(UserError, match="no input is given"):
        list_inputs([])


def test_parts_of_a_file_are_disjoint_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"text": f"{n}" * (n % 5 + 1)} for n in range(20)]).rstrip())
    size = path.stat().st_size
    whole = list(read_documents(path))
    assert len(whole) == 20
    for step in (1, 7, 13, 14, 50, size):
        parts = [list(read_documents(path, start=at, stop=at + step)) for at in range(0, size, step)]
        assert list(chain(*parts)) == whole


BAD_LINES = {
    b"{": "not JSON",
    b'{"body": "x", "id": 1}': 'no key "text" among body, id',
    b'{"text": 3}': "holds a int",
    b'["x"]': "found a list",
    b'{"text": "\xff"}': "not UTF-8",
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_bad_line_is_named(tmp_path: Path, line: bytes) -> None:
    good = jsonl(ROWS)
    (tmp_path / "a.jsonl").write_bytes(good + line + b"\n" + good)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(good + line))
    for name in ("a.jsonl", "b.jsonl.gz"):
        with pytest.raises(UserError, match=f"{name}, line 6: .*{BAD_LINES[line]}"):
            list(read_documents(tmp_path / name))
    with pytest.raises(UserError, match="line 6"):
        list(read_documents(tmp_path / "a.jsonl", start=len(good) - 3))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS * 50))[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read"):
        list(read_documents(tmp_path / "a.jsonl.gz"))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("tokenizer", [{"tokenizer": "bytes"}, {"train_tokenizer_vocab": 300}], ids=str)
def test_a_text_in_another_encoding_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int, tokenizer: dict
) -> None:
    """The parts that were tokenized without an error are kept for the next attempt."""
    monkeypatch.setattr("fourfold.data.shards.SMALLEST_SHARD", 8)
    for name, content in {"a": "größer".encode(), "b": "für".encode("latin-1")}.items():
        (tmp_path / f"{name}.txt").write_bytes(content.rjust(8))
    with pytest.raises(UserError, match=r"b\.txt is not text in UTF-8: .* in position 6"):
        prepare([f"{tmp_path}/*.txt"], tmp_path / "out" / "c", workers=workers, **tokenizer)
    assert not (tmp_path / "out" / "c.json").exists()
    if "tokenizer" in tokenizer:
        assert len(list((tmp_path / "out" / "c.parts").glob("*.npy"))) == 1


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
def test_the_advice_for_text_in_another_encoding_works(tmp_path: Path) -> None:
    texts = {"cp1252": "Das wäre größer.", "cp932": "こんにちは世界", "iso-2022-jp-2": "日本", "utf-16le": "größer"}
    for name, text in texts.items():
        file, converted = tmp_path / f"{name}.txt", tmp_path / "NEW.txt"
        file.write_bytes(text.encode(name))
        with pytest.raises(UserError, match="not text in UTF-8") as error:
            list(read_documents(file))
        command = "iconv -f ENCODING -t UTF-8 FILE > NEW.txt"
        assert command in str(error.value)
        command = command.replace("ENCODING", name).replace("FILE", str(file)).replace("NEW.txt", str(converted))
        subprocess.run(command, shell=True, check=True)
        assert list(read_documents(converted)) == [text]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"some\0bytes", r"it has the control character '\\x00'"),
        (b"\x1b[31mred", r"it has the control character '\\x1b'"),
        ("wide".encode("utf-16"), "can't decode byte 0xff in position 0"),
        ("wide".encode("utf-16-be"), r"it has the control character '\\x00'"),
        ("wide".encode("utf-32"), "can't decode byte 0xff in position 0"),
        ("日本".encode("iso2022_jp"), r"it has the control character '\\x1b'"),
        ("für".encode("latin-1"), "can't decode byte 0xfc in position 1"),
        (b"\xef\xbb\xbff\xfcr", "can't decode byte 0xfc in position 1"),
    ],
)
def test_no_text_is_decoded_wrongly(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=rf"a\.txt\.gz is not text in UTF-8: .*{says}"):
        prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", workers=1)


def test_unsupported_files_are_named_as_left_out(tmp_path: Path) -> None:
    for name in ("a.txt", "notes.md", "sub/b.txt", "sub/page.html", ".hidden.md", ".git/x.md"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "in" / name).write_text(name)
    summary = prepare([tmp_path / "in"], tmp_path / "c", tokenizer="bytes", workers=1)
    names = f"{tmp_path}/in/notes.md, {tmp_path}/in/sub/page.html"
    assert summary.notes == (f"left out, unsupported kind: {names}",)
    again = prepare([tmp_path / "in"], tmp_path / "c", tokenizer="bytes", workers=1)
    assert again.reused and again.notes == summary.notes
    for pattern in ("*", "**"):
        globbed = prepare([f"{tmp_path}/in/{pattern}"], tmp_path / "d", tokenizer="bytes", workers=1)
        assert globbed.notes == summary.notes and globbed.train.documents == summary.train.documents == 2
    assert prepare([tmp_path / "in" / "a.txt"], tmp_path / "e", tokenizer="bytes", workers=1).notes == ()


def test_pipes_and_links_are_named_as_left_out(tmp_path: Path) -> None:
    (tmp_path / "in" / "sub").mkdir(parents=True)
    (tmp_path / "in" / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "in" / "pipe.txt")
    (tmp_path / "in" / "broken.txt").symlink_to("nothing")
    (tmp_path / "in" / "linked").symlink_to("sub")
    for _ in range(2):
        notes = prepare([tmp_path / "in"], tmp_path / "c", tokenizer="bytes", workers=1).notes
        names = ", ".join(f"{tmp_path}/in/{name}" for name in ("broken.txt", "linked", "pipe.txt"))
        assert notes == (f"left out, not a file (a pipe, a device, or a link to no file): {names}",)


def test_the_first_of_several_text_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"content": "one"}, {"body": "two", "content": "three"}]))
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"body": "four", "a,b": "five"}]))
    assert [text for name in "ab" for text in read_documents(tmp_path / f"{name}.jsonl", "body,content")] == [
        *("one", "two", "four")
    ]
    assert list(read_documents(tmp_path / "b.jsonl", "a,b")) == ["five"]
    with pytest.raises(UserError, match='no key "text" among content; choose one with --text-key, or several as in'):
        list(read_documents(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.jsonl"])
def test_text_that_expands_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("fourfold.data.sources.LONGEST_TEXT", 1 << 20)
    monkeypatch.setattr("fourfold.data.sources.BLOCK", 1 << 18)
    read = []
    monkeypatch.setattr(
        gzip.GzipFile, "read", lambda file, size, real=gzip.GzipFile.read: read.append(real(file, size)) or read[-1]
    )
    content = b"x" * (8 << 20)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(UserError, match=rf"{name}(, line 1)? (expands to|has) more than 1,048,576 bytes"):
        list(read_documents(tmp_path / name))
    assert sum(map(len, read)) <= 2 << 20


def test_text_that_does_not_fit_in_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", fail)
        with pytest.raises(UserError, match=r"a\.txt does not fit in memory; a text file is one document, so split it"):
            list(read_documents(tmp_path / "a.txt"))
    monkeypatch.setattr("fourfold.data.shards.as_document", fail)
    with pytest.raises(UserError, match=r"a document of .*a\.txt does not fit in memory while it is tokenized"):
        prepare([tmp_path / "a.txt"], tmp_path / "c", tokenizer="bytes", workers=1)


def test_a_lone_surrogate_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x\\ud800y \\ud83d\\ude42"}\n')
    assert list(read_documents(tmp_path / "a.jsonl")) == ["x?y 🙂"]


def test_python_stdlib() -> None:
    files = list_inputs(["python-stdlib"])
    assert files == list_inputs(["python-stdlib"])
    assert not any("site-packages" in file.path for file in files)
    texts = documents_of(["python-stdlib"])
    assert sum(map(len, texts)) >= 5_000_000
    assert len(texts) > 100
