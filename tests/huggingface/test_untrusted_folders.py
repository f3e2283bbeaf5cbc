"""Untrusted model folders: no path out of them is followed, no code runs, and nothing hangs."""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_huggingface import make_model

import fourfold
from fourfold.data.indexed import IndexedDataset
from fourfold.data.sources import list_inputs
from fourfold.data.tokenizer import HFTokenizer
from fourfold.data.transformers_tokenizer import load_any_tokenizer, open_tokenizer
from fourfold.errors import UserError
from fourfold.huggingface.export_model import as_huggingface
from fourfold.huggingface.import_model import import_huggingface
from fourfold.huggingface.model_folder import SOURCE_FOLDER, keep_small_files, source_of
from fourfold.huggingface.transformers_models import load_model
from fourfold.models.tensor_files import INDEX_FILE

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "secret.json").write_text('{"secret": 1}')
    return make_model(tmp_path / "model", "llama")


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        import_huggingface(str(folder), folder.parent / "ours")
    assert not (folder.parent / "ours").exists()
    return str(caught.value)


def changed_index(folder: Path, file: object) -> str:
    """Make the index place all tensors of the first file in another file. Return the first file's name."""
    index = json.loads((folder / INDEX_FILE).read_text())
    first = sorted(index["weight_map"].values())[0]
    index["weight_map"] = {name: file if old == first else old for name, old in index["weight_map"].items()}
    (folder / INDEX_FILE).write_text(json.dumps(index))
    return str(first)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json", "chat_template.jinja", INDEX_FILE])
def test_links_out_of_a_model_are_refused_by_every_reader(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret.json")
    assert "outside the model's folder" in refusal(folder)
    readers: tuple[Callable[[], object], ...] = (
        lambda: load_model(folder),
        lambda: open_tokenizer(str(folder)),
        lambda: HFTokenizer(folder),
        lambda: keep_small_files(folder, folder.parent / "copy"),
        lambda: as_huggingface(str(folder)).__enter__(),
    )
    for read in readers if name != "config.json" else readers[:4]:
        with pytest.raises(UserError, match="outside the model's folder"):
            read()
    assert not (folder.parent / "copy").exists()


def test_links_out_of_an_imported_checkpoint_are_not_published(folder: Path) -> None:
    import_huggingface(str(folder), folder.parent / "ours")
    kept = folder.parent / "ours" / SOURCE_FOLDER
    (kept / "merges.txt").symlink_to("/etc/hostname")
    with pytest.raises(UserError, match=r"merges\.txt is a link to /etc/hostname"):
        source_of(folder.parent / "ours")


def test_links_in_the_folder_and_of_the_cache_of_the_hub_are_followed(folder: Path) -> None:
    snapshot, blobs = folder.parent / "models--a--b/snapshots/123", folder.parent / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (snapshot / "tokenizer_config.json").symlink_to("config.json")
    assert import_huggingface(str(snapshot), folder.parent / "ours").kind == "llama"
    # A link in the folder ``blobs`` leads out of it.
    (blobs / "out").symlink_to("../../secret.json")
    (snapshot / "vocab.json").symlink_to("../../blobs/out")
    with pytest.raises(UserError, match=r"vocab\.json is a link"):
        import_huggingface(str(snapshot), folder.parent / "again")


@pytest.mark.parametrize("name", ["../secret.safetensors", "{folder}/../secret.safetensors", ".", "..", "", "a\0b"])
def test_an_index_names_files_of_its_own_folder(folder: Path, name: str) -> None:
    first = changed_index(folder, name.format(folder=folder))
    (folder / first).rename(folder.parent / "secret.safetensors")
    assert "not the name of a file in the same folder" in refusal(folder)
    with pytest.raises(UserError, match="not the name of a file in the same folder"):
        load_model(folder)


def test_small_files_that_are_not_json_are_not_copied(folder: Path) -> None:
    (folder / "special_tokens_map.json").write_text("root:x:0:0")
    assert "special_tokens_map.json is not JSON" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX_FILE, "model-00002-of"])
def test_named_pipes_are_refused(folder: Path, name: str) -> None:
    (file,) = folder.glob(f"{name}*")
    file.unlink()
    os.mkfifo(file)
    assert f"cannot read {file}" in refusal(folder)
    with pytest.raises(UserError, match=re.escape(f"cannot read {file}")), as_huggingface(str(folder)) as (named, _):
        load_any_tokenizer(named)


def test_named_pipes_of_a_corpus_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "c.idx")
    with pytest.raises(UserError, match="named pipe"):
        IndexedDataset(tmp_path / "c")
    os.mkfifo(tmp_path / "c.txt")
    with pytest.raises(UserError, match="named pipe"):
        list_inputs([tmp_path / "c.txt"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(folder: Path, value: float) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    assert f"{name} has values that are NaN or infinite" in refusal(folder)


def test_float8_weights_are_named(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        save_file({k: v.to(torch.float8_e4m3fn) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    assert "is stored as F8_E4M3; convert it to one of F64, F32, BF16, F16" in refusal(folder)


def test_every_from_pretrained_refuses_code_of_a_model() -> None:
    calls = [
        (path.name, node)
        for path in Path(fourfold.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained")
    ]
    assert len(calls) >= 2
    for name, call in calls:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("trust_remote_code") == "False", f"{name}, line {call.lineno}"


def test_code_of_a_model_is_refused_without_a_question(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question was asked"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "their_own", "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "m.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    auto = {"tokenizer_class": "Theirs", "auto_map": {"AutoTokenizer": ["m.T", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(auto))
    for read in (load_model, open_tokenizer):
        with pytest.raises(UserError, match="its own Python code, but fourfold never runs such code"):
            read(str(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_a_quantized_model_names_the_package_that_it_needs(folder: Path, method: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    how = {"quant_method": method, "bits": 4, "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    with pytest.raises(UserError, match="pip install"):
        load_model(folder)


def test_an_adapter_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    for read in (lambda: import_huggingface(str(tmp_path), tmp_path / "out"), as_huggingface(str(tmp_path)).__enter__):
        with pytest.raises(UserError, match=r"a peft adapter for the model org/base.*merge_and_unload"):
            read()


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_tokenizers_of_other_formats_can_be_converted(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UserError, match=r"AutoTokenizer.*converts"):
            HFTokenizer(path)
