"""Documents out of every kind of file, and one sentence for each that cannot be read."""

import gzip
import json
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


def test_inputs_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden/d.txt", "ignored.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert documents_of([tmp_path]) == ["a.txt", "b.txt", "sub/c.txt"]
    assert documents_of([tmp_path / "b.txt", f"{tmp_path}/a*"]) == ["b.txt", "a.txt"]
    assert documents_of([f"{tmp_path}/**/c.txt"]) == ["sub/c.txt"]
    for item, message in (
        ("none.txt", "does not exist"),
        ("x*", "no file of a readable"),
        ("ignored.bin", "unknown kind"),
    ):
        with pytest.raises(UserError, match=message):
            list_inputs([tmp_path / item])
    with pytest.raises(UserError, match="nothing to prepare"):
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
    b'["x"]': "a list where",
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


def test_damaged_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(ROWS * 50))[:-20])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read"):
        list(read_documents(tmp_path / "a.jsonl.gz"))
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8"):
        list(read_documents(tmp_path / "a.txt"))


def test_texts_of_another_encoding_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("ü", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "x"}')
    for number in range(13):
        (tmp_path / f"bad{number:02}.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(UserError) as error:
        prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", workers=1)
    message = str(error.value)
    assert message.startswith("13 of 14 text files are not UTF-8: ")
    assert [f"bad{number:02}.txt (byte 1)" in message for number in range(13)] == [True] * 10 + [False] * 3
    assert "and 3 more; name their encoding with --encoding" in message
    assert not (tmp_path / "out" / "c.json").exists()


def test_texts_that_cannot_be_read_are_named_with_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text " * 100)[:-20])
    (tmp_path / "b.txt.gz").write_bytes(b"not gzip")
    (tmp_path / "c.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(UserError) as error:
        prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", workers=1)
    for part in ("a.txt.gz cannot be read: ", "b.txt.gz cannot be read: ", "1 of 3 text files is not UTF-8: "):
        assert part in str(error.value)


def test_the_encoding_that_does_not_fit_is_not_advised(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"odd")
    with pytest.raises(UserError, match=r"is not utf-16 text .* \(such as latin-1 or cp1252\)"):
        prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", encoding="utf-16")


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_an_encoding_that_is_named(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "a.txt").write_bytes("für".encode(encoding))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress("möge".encode(encoding)))
    (tmp_path / "c.jsonl").write_bytes(jsonl([{"text": "drei ü"}]))  # JSON is UTF-8
    prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", encoding=encoding, workers=1)
    tokens = IndexedDataset(tmp_path / "out" / "c").read(0, 19).tolist()
    assert tokens == [*"für".encode(), 256, *"möge".encode(), 256, *"drei ü".encode(), 256]
    assert prepare([tmp_path], tmp_path / "out" / "c", tokenizer="bytes", encoding=encoding, workers=1).reused
    with pytest.raises(UserError, match=r"b\.txt\.gz is not UTF-8 text \(byte \d\); name its encoding"):
        prepare([tmp_path / "b.txt.gz"], tmp_path / "out" / "c", tokenizer="bytes")


def test_an_encoding_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(ROWS))
    for name in ("latin-99", "hex"):
        with pytest.raises(UserError, match=f"--encoding {name} is not a text encoding of Python; utf-8, latin-1"):
            prepare([tmp_path], tmp_path / "c", tokenizer="bytes", encoding=name)
    with pytest.raises(
        UserError, match=r"--encoding iso8859-1 is for \.txt and \.txt\.gz files, and the input has none"
    ):
        prepare([tmp_path], tmp_path / "c", tokenizer="bytes", encoding="latin-1")


def test_half_a_character_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x\\ud800y \\ud83d\\ude42"}\n')
    assert list(read_documents(tmp_path / "a.jsonl")) == ["x?y 🙂"]


def test_python_stdlib() -> None:
    files = list_inputs(["python-stdlib"])
    assert files == list_inputs(["python-stdlib"])
    assert not any("site-packages" in file.path for file in files)
    texts = documents_of(["python-stdlib"])
    assert sum(map(len, texts)) >= 5_000_000
    assert len(texts) > 100
