"""Documents from every kind of file, and one sentence for each file that cannot be read."""

import codecs
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

from fourfold.data.indexed import IndexedDataset
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
    (tmp_path / "a.txt").write_bytes(b"\xff\xfex")
    with pytest.raises(UserError, match="not utf-16 text, although its byte-order mark says so"):
        list(read_documents(tmp_path / "a.txt"))


@pytest.mark.parametrize("tokenizer", [{"tokenizer": "bytes"}, {"train_tokenizer_vocab": 300}], ids=str)
def test_all_files_of_unknown_encoding_are_named(tmp_path: Path, tokenizer: dict) -> None:
    (tmp_path / "good.txt").write_text("ü", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "x"}')
    for number in range(13):
        (tmp_path / f"bad{number:02}.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(UserError) as error:
        prepare([tmp_path], tmp_path / "out" / "c", workers=1, **tokenizer)
    message = str(error.value)
    named = [f"bad{number:02}.txt is not utf-8 text (byte 1)" in message for number in range(13)]
    assert named == [True] * 10 + [False] * 3
    assert "; 3 more files cannot be read; name the encoding of files that are not UTF-8 with --encoding" in message
    assert not (tmp_path / "out" / "c.json").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_unreadable_files_of_all_shards_are_named_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr("fourfold.data.shards.SMALLEST_SHARD", 8)
    contents = {"a": "für".encode("latin-1"), "b": b"fine text", "c": "für".encode("latin-1"), "d": b"fine as well"}
    for name, content in contents.items():
        (tmp_path / f"{name}.txt").write_bytes(content.rjust(8))
    with pytest.raises(UserError) as error:
        prepare([f"{tmp_path}/*.txt"], tmp_path / "out" / "c", tokenizer="bytes", workers=workers)
    named = [message.partition(" is not utf-8 text")[0] for message in str(error.value).split("; ")]
    assert named[:2] == [f"{tmp_path}/a.txt", f"{tmp_path}/c.txt"] and named[2].startswith("name the encoding")
    assert len(list((tmp_path / "out" / "c.parts").glob("*.npy"))) == 2, "the good shards stay"


def test_unreadable_files_and_unknown_encodings_are_named_together(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text " * 100)[:-20])
    (tmp_path / "b.txt.gz").write_bytes(b"not gzip")
    (tmp_path / "c.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(UserError) as error:
        prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", workers=1)
    for part in ("a.txt.gz cannot be read: ", "b.txt.gz cannot be read: ", "c.txt is not utf-8 text"):
        assert part in str(error.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_the_named_encoding_is_only_for_files_that_need_it(tmp_path: Path, encoding: str) -> None:
    """A named encoding applies only to files that are not UTF-8 and have no byte-order mark."""
    texts = {"a.txt": ("Déjà vu, größer.", "utf-8"), "b.txt": ("Déjà vu ailleurs.", encoding)}
    texts |= {"c.txt": ("Déjà vu «ici».", "latin-1"), "d.txt": ("Déjà vu là.", "utf-8-sig")}
    for name, (text, each) in texts.items():
        (tmp_path / name).write_bytes(text.encode(each))
    summary = prepare([f"{tmp_path}/*.txt"], tmp_path / "c", tokenizer="bytes", encoding="latin-1", workers=1)
    corpus = IndexedDataset(tmp_path / "c")
    expected = [token for text, _ in texts.values() for token in (*text.encode(), 256)]
    assert corpus.read(0, corpus.tokens).tolist() == expected
    assert summary.notes == (
        f"read as {encoding} (byte-order mark): {tmp_path}/b.txt",
        f"read as iso8859-1 (--encoding): {tmp_path}/c.txt",
    )
    again = prepare([f"{tmp_path}/*.txt"], tmp_path / "c", tokenizer="bytes", encoding="latin-1", workers=1)
    assert again.reused and again.notes == summary.notes


def texts_of(folder: Path, **options: object) -> tuple[list[str], tuple[str, ...]]:
    """Return the documents of a corpus made from the text files in a folder, and the notes of `prepare`."""
    summary = prepare([f"{folder}/*.txt"], folder / "c", tokenizer="bytes", workers=1, **options)
    corpus = IndexedDataset(folder / "c")
    text = bytes(token if token < 256 else 0 for token in corpus.read(0, corpus.tokens).tolist()).decode()
    return text.split("\0")[:-1], summary.notes


@pytest.mark.parametrize("encoding", ["iso2022_jp", "iso2022_kr", "hz", "utf-7", "unicode-escape"])
def test_a_named_seven_bit_encoding_is_used_for_ascii_files(tmp_path: Path, encoding: str) -> None:
    """A file of ASCII bytes is valid UTF-8 too, but is decoded in the named encoding. A file with other bytes is read
    as UTF-8, and a byte-order mark still decides first."""
    (tmp_path / "a.txt").write_bytes("ein 日本 +1-".encode(encoding))
    (tmp_path / "b.txt").write_text("größer", encoding="utf-8")
    (tmp_path / "c.txt").write_text("plain", encoding="utf-8")
    (tmp_path / "d.txt").write_bytes("größer".encode("utf-16"))
    texts, notes = texts_of(tmp_path, encoding=encoding)
    assert texts == ["ein 日本 +1-", "größer", "plain", "größer"]
    assert notes == (
        f"read as {encoding} (--encoding): {tmp_path}/a.txt",
        f"read as utf-16 (byte-order mark): {tmp_path}/d.txt",
    )
    (tmp_path / "a.txt").unlink()
    assert texts_of(tmp_path, encoding=encoding)[1] == (
        f"read as utf-16 (byte-order mark): {tmp_path}/d.txt",
        f"--encoding {encoding} was not needed: all files are UTF-8 or have a byte-order mark",
    )


def test_a_byte_order_mark_in_the_named_encoding_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffgrößer 日".encode("gb18030"))
    assert texts_of(tmp_path, encoding="gb18030")[0] == ["größer 日"]


def refusal(folder: Path, **options: object) -> str:
    with pytest.raises(UserError) as error:
        texts_of(folder, **options)
    return str(error.value)


def run_advice(message: str, command: str, file: Path) -> None:
    """Run the command that a message suggests on a file, and replace the file by its output."""
    assert command in message
    new = file.with_name("NEW")
    subprocess.run(command.replace("FILE", str(file)).replace("NEW.txt", str(new)), shell=True, check=False)
    new.replace(file)


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
def test_the_advice_for_damaged_files_and_for_several_encodings_works(tmp_path: Path) -> None:
    damaged = {"a.txt": "größer".encode("utf-16") + b"x", "b.txt": codecs.BOM_UTF8 + "größer".encode("latin-1")}
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
    message = refusal(tmp_path)
    assert "files that are not UTF-8" not in message, "the mark decides whatever --encoding says"
    run_advice(message, "iconv -c -f utf-16 -t utf-8 FILE > NEW.txt", tmp_path / "a.txt")
    run_advice(message, "tail -c +4 FILE > NEW.txt", tmp_path / "b.txt")
    assert texts_of(tmp_path, encoding="latin-1")[0] == ["größer", "größer"]

    texts = {"cp1252": "Das wäre größer.", "cp932": "こんにちは世界", "iso-2022-jp-2": "日本"}
    for number, (name, text) in enumerate(texts.items()):
        (tmp_path / f"{'abc'[number]}.txt").write_bytes(text.encode(name))
    message = refusal(tmp_path)
    for name, file in zip(texts, "abc", strict=True):
        command = f"iconv -f {name} -t UTF-8 FILE > NEW.txt"
        run_advice(message.replace("ENCODING", name), command, tmp_path / f"{file}.txt")
    assert texts_of(tmp_path)[0] == list(texts.values())


@pytest.mark.parametrize(
    ("content", "encoding", "says"),
    [
        (b"some\0bytes", None, "has NUL bytes, so it is not utf-8 text; remove such characters, or leave the file out"),
        (b"some\0bytes", "latin-1", "has NUL bytes, so it is not iso8859-1 text; remove such characters, or leave"),
        (b"\0" * 1000, None, "has NUL bytes, so it is not utf-8 text"),
        ("a\0b".encode("utf-16"), "latin-1", "has NUL bytes, so it is not text"),
        ("“quoted”".encode("cp1252"), "latin-1", r"is not iso8859-1 text: it would have the character '\\x93'"),
        ("für".encode("latin-1"), "utf-16-le", r"is neither utf-8 nor utf-16-le text \(byte \d"),
        ("日本".encode("utf-16-be"), "utf-16", "has no byte-order mark, so --encoding utf-16 .* name utf-16-le or"),
        ("wide".encode("utf-16-be"), None, "has NUL bytes, .*; if it is UTF-16, name utf-16-le or utf-16-be with"),
        (b"\x1b[31mred", None, r"has the control character ESC \(byte 0\); remove such characters, .* with --encoding"),
        ("\x1b[31mred".encode("utf-16"), "latin-1", r"has the control character ESC \(byte 2\); remove such"),
        (b"\x1b[31mred", "iso2022_jp", r"is not iso2022_jp text: it would have the character '\\x1b'"),
        (b"f\xfcr \x07", "latin-1", r"is not iso8859-1 text: it would have the character '\\x07'"),
        (
            b"1 ~ 2",
            "hz",
            r"is utf-8 text and not hz \(byte 2\); prepare it separately from hz text, without --encoding$",
        ),
        (b"1+1=2", "utf-7", r"is utf-8 text and not utf-7 \(byte 1\); prepare it separately from"),
        (b"+2AA-", "utf-7", r"is not utf-7 text: it would have the character '\\ud800'"),
        ("für".encode("latin-1"), "utf-8", r"is not utf-8 text \(byte 1"),
        (b"\xef\xbb\xbff\xfcr", "latin-1", "is not utf-8-sig text, although its byte-order mark says so"),
    ],
)
def test_no_text_is_decoded_wrongly(tmp_path: Path, content: bytes, encoding: str | None, says: str) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=rf"a\.txt\.gz {says}"):
        prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", encoding=encoding, workers=1)


def test_an_unknown_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    for name in ("latin-99", "hex", "idna", "undefined", "punycode"):
        with pytest.raises(
            UserError, match=f"--encoding {name} is not a text encoding of Python; examples are latin-1, cp1252"
        ):
            prepare([tmp_path], tmp_path / "c", tokenizer="bytes", encoding=name)
    with pytest.raises(
        UserError, match=r"--encoding iso8859-1 is for \.txt and \.txt\.gz files, but the input has none"
    ):
        prepare([tmp_path], tmp_path / "c", tokenizer="bytes", encoding="latin-1")


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
        patch.setattr("fourfold.data.sources.decode", fail)
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
