"""Hugging Face models in and out: into checkpoints of ours, out of them, and straight into a job's shards."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor

from fourfold.checkpoints.find import STATE_FILE, newest_checkpoint
from fourfold.checkpoints.saved_state import write_imported
from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.config.model import ModelConfig
from fourfold.data.build import ensure_builtin
from fourfold.data.files import new_folder, write_whole
from fourfold.data.manifest import corpus_tokenizer, read_manifest
from fourfold.data.tokenizer import HFTokenizer, load_tokenizer
from fourfold.data.tokenizer import Tokenizer as AnyTokenizer
from fourfold.errors import UserError
from fourfold.huggingface.adapters import Merged, open_base, write_adapter
from fourfold.huggingface.architectures.config_json import (
    CONFIG_FILE,
    config_of,
    local_folder,
    model_of,
    read_config,
    same_model,
)
from fourfold.huggingface.weight_names import TheirTensor, name_map
from fourfold.huggingface.weights import Pretrained
from fourfold.models.dtypes import DTYPES
from fourfold.models.lora import ADAPTERS
from fourfold.models.tensor_files import Entry, write_tensor_files
from fourfold.parallel.state import initialize_shards
from fourfold.run_file.load import load_run
from fourfold.training.job import Job

SOURCE_FOLDER = "huggingface"
"""Beside the weights of an import, and in the folder of a run from one: the small files of the original."""

TOKENIZER_FILE, GENERATION_FILE = "tokenizer.json", "generation_config.json"
SMALL_FILES = (
    CONFIG_FILE,
    GENERATION_FILE,
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
PATTERNS = (*SMALL_FILES, "*.safetensors", "*.safetensors.index.json")
"""What is fetched of a model on the Hub: no pickles, and no code."""

_TYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
"""As config.json names the types."""


@dataclass(frozen=True)
class Transferred:
    """What an import or export wrote. kind: the model_type; parameters: without padding; files: bytes of each."""

    folder: str
    kind: str
    parameters: int
    files: dict[str, int]

    def record(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "folder": self.folder,
            "model_type": self.kind,
            "parameters": self.parameters,
            "bytes": sum(self.files.values()),
            "files": len(self.files),
        }


def import_huggingface(name: str, out: Path) -> Transferred:
    """Write a Hugging Face model as a checkpoint of weights, in the types in which its files have them.

    One parameter is in memory at a time. Raises ``UserError`` for what the decoder does not compute, for files that are
    missing, damaged or of other shapes, and when ``out`` exists.
    """
    folder = local_folder(name, PATTERNS)
    model = model_of(read_config(folder), str(folder))
    pretrained = Pretrained(folder, model)
    _check_tokenizer(folder / TOKENIZER_FILE, model)
    entries = [
        Entry(f"model.{ours}", pretrained.dtype(ours), shape, partial(_whole, pretrained, ours, shape))
        for ours, shape in pretrained.shapes.items()
    ]
    with new_folder(out) as partial_folder:
        files = write_tensor_files(partial_folder, entries)
        keep_small_files(folder, partial_folder / SOURCE_FOLDER)
        write_imported(partial_folder, model, files)
    return Transferred(str(out), pretrained.kind, _count(pretrained.tensors), files)


def export_huggingface(
    checkpoint: Path,
    out: Path,
    dtype: str = "auto",
    kind: str | None = None,
    tokenizer: str | None = None,
    merge: bool = False,
) -> Transferred:
    """Write a checkpoint of any grid as a folder that transformers opens; one tensor is in memory at a time.

    LoRA's adapters become a folder that peft opens, or with ``merge`` the model that they make with their base.

    dtype: of the weights; auto: as the model that training began with, else as stored. kind: the model_type to write,
    by default that of the original, else the first that computes the same. tokenizer: a tokenizer.json; by default
    the original's files, else the tokenizer of the run's corpus.
    """
    checkpoint = _newest(checkpoint)
    saved = SavedWeights(checkpoint)
    if merge and saved.state.lora is None:
        raise UserError(f"the checkpoint {checkpoint} holds a whole model; there are no adapters to merge")
    if saved.state.lora is not None and not merge:
        given = {"--dtype": dtype != "auto", "--model-type": kind is not None, "--tokenizer": tokenizer is not None}
        for option in (name for name, is_given in given.items() if is_given):
            raise UserError(f"{option} is for a whole model, and {checkpoint} holds adapters; export them with --merge")
        return _export_adapter(checkpoint, saved, out)
    weights = Merged(saved, open_base(saved, PATTERNS)) if merge else saved
    source = source_of(checkpoint)
    config = _config(saved.model, source, kind)
    types = dict(weights.dtypes)
    wanted = DTYPES.get(dtype)
    if wanted is None and source is not None and not saved.state.weights_only:
        wanted = _TYPE_NAMES.get(str(config.get("dtype", config.get("torch_dtype"))))
    if wanted is not None:
        types = dict.fromkeys(types, wanted)
    if source is None or wanted is not None or not saved.state.weights_only:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = next(name for name, each in _TYPE_NAMES.items() if each == types["embed_tokens.weight"])
    entries = []
    tensors = name_map(config["model_type"], saved.model)
    for tensor in tensors:
        make = partial(_joined, weights, tensor, types[tensor.pieces[0].name])
        entries.append(Entry(tensor.name, types[tensor.pieces[0].name], tensor.shape, make))
    with new_folder(out) as partial_folder:
        if source is not None:
            keep_small_files(source, partial_folder)
        if source is None or tokenizer is not None:
            config |= _write_tokenizer(partial_folder, checkpoint, tokenizer, saved.model)
        write_whole(partial_folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        files = write_tensor_files(partial_folder, entries)
    return Transferred(str(out), config["model_type"], _count(tensors), files)


def _export_adapter(checkpoint: Path, saved: SavedWeights, out: Path) -> Transferred:
    base = open_base(saved, PATTERNS)
    with new_folder(out) as partial_folder:
        files = write_adapter(partial_folder, saved, base)
        source = source_of(checkpoint)
        if source is not None:
            keep_small_files(
                source, partial_folder, [n for n in SMALL_FILES if n not in (CONFIG_FILE, GENERATION_FILE)]
            )
    return Transferred(str(out), f"LoRA of {base.kind}", sum(map(math.prod, saved.shapes.values())), files)


@contextmanager
def as_huggingface(name: str) -> Iterator[tuple[str, str]]:
    """A model as transformers opens it, and its tokenizer: a folder or an id of the Hub each, or "bytes".

    A checkpoint or run of ours is exported into a temporary folder for as long as the block lasts, in the types in
    which its weights are stored, adapters merged. Raises ``UserError`` where there is no model of that name.
    """
    path = Path(name).expanduser()
    if not path.is_dir() or (path / CONFIG_FILE).is_file():
        folder = str(local_folder(name, PATTERNS))
        yield folder, folder
        return
    checkpoint = _newest(path)
    with tempfile.TemporaryDirectory(prefix="fourfold-") as temporary:
        folder = Path(temporary) / "model"
        export_huggingface(checkpoint, folder, merge=SavedWeights(checkpoint).state.lora is not None)
        has_tokenizer = (folder / TOKENIZER_FILE).is_file()
        yield str(folder), str(folder) if has_tokenizer or _tokenizer_of_run(checkpoint) is None else "bytes"


def load_pretrained(job: Job, name: str) -> None:
    """Fill a job's weights from a Hugging Face model: every process reads the slices that it holds.

    LoRA's adapters are as at the start of a run.
    """
    if dist.get_rank() == 0:
        local_folder(name, PATTERNS)
    dist.barrier()
    pretrained = Pretrained(local_folder(name, PATTERNS), job.run.model)
    initialize_shards([shard for shard in job.shards if _is_adapter(shard.name)], job.run.model, job.run.training.seed)
    for shard in job.shards:
        if shard.local.numel() and not _is_adapter(shard.name):
            pretrained.read_into(shard.local, shard.name, shard.slices)
    job.publish()


def _is_adapter(name: str) -> bool:
    return name.endswith(ADAPTERS)


def check_same_tokenizer(name: str, tokenizer: AnyTokenizer | None) -> None:
    """Raise ``UserError`` when a corpus was made with another vocabulary than that of the model ``name``.

    Nothing is known where one of them does not say.
    """
    file = local_folder(name, PATTERNS) / TOKENIZER_FILE
    if tokenizer is None or not file.is_file():
        return
    if isinstance(tokenizer, HFTokenizer):
        theirs, ours = (Tokenizer.from_file(str(path)).get_vocab() for path in (file, tokenizer.path))
        if theirs == ours:
            return
    raise UserError(
        f"the corpus was made with another tokenizer than {file}, which is the model's; prepare it with --tokenizer "
        f"{file}"
    )


def keep_small_files(folder: Path, out: Path, names: Sequence[str] = SMALL_FILES) -> None:
    """Copy what a Hugging Face model has besides weights."""
    out.mkdir(exist_ok=True)
    for name in names:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _count(tensors: Sequence[TheirTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def _whole(pretrained: Pretrained, name: str, shape: tuple[int, ...]) -> Tensor:
    out = torch.empty(shape, dtype=pretrained.dtype(name))
    pretrained.read_into(out, name, tuple(slice(0, n) for n in shape))
    return out


def _joined(weights: SavedWeights | Merged, tensor: TheirTensor, dtype: torch.dtype) -> Tensor:
    """A tensor of theirs: its pieces without padding, one below the other, transposed where theirs is."""
    groups = [
        weights.read(piece.name)[: piece.rows].to(dtype).unflatten(0, (piece.groups, -1)) for piece in tensor.pieces
    ]
    whole = (groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)).flatten(0, 1)
    return whole.T.contiguous() if tensor.transposed else whole


def _newest(path: Path) -> Path:
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        raise UserError(f"{path} is no checkpoint (a folder with {STATE_FILE}), and no run's folder that has one")
    return checkpoint


def source_of(checkpoint: Path) -> Path | None:
    """The small files of the model that a checkpoint was imported from, or its run began with."""
    places = (checkpoint / SOURCE_FOLDER, checkpoint.resolve().parent.parent / SOURCE_FOLDER)
    return next((place for place in places if (place / CONFIG_FILE).is_file()), None)


def _config(model: ModelConfig, source: Path | None, kind: str | None) -> dict[str, Any]:
    """The original's config.json as it was, where it still describes the model; else a new one."""
    if source is None:
        return config_of(model, kind)
    original = read_config(source)
    if kind in (None, original["model_type"]) and same_model(model, original):
        return original
    kept = {key: value for key, value in original.items() if key.endswith("_token_id")}
    return config_of(model, kind or original["model_type"]) | kept


def _write_tokenizer(folder: Path, checkpoint: Path, name: str | None, model: ModelConfig) -> dict[str, Any]:
    """The tokenizer as transformers reads it; what config.json says of it. Bytes have no such file."""
    tokenizer = load_tokenizer(name) if name is not None else _tokenizer_of_run(checkpoint)
    if tokenizer is None:
        return {}
    ids = {"eos_token_id": tokenizer.eod_id}
    write_whole(folder / GENERATION_FILE, (json.dumps(ids) + "\n").encode())
    if isinstance(tokenizer, HFTokenizer):
        _check_tokenizer(tokenizer.path, model)
        shutil.copyfile(tokenizer.path, folder / TOKENIZER_FILE)
        end = Tokenizer.from_file(str(tokenizer.path)).id_to_token(tokenizer.eod_id)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        write_whole(folder / "tokenizer_config.json", (json.dumps(about) + "\n").encode())
    return {"bos_token_id": None, **ids}


def _tokenizer_of_run(checkpoint: Path) -> AnyTokenizer | None:
    run_file = checkpoint.resolve().parent.parent / "run.toml"
    if not run_file.is_file():
        return None
    run = load_run(run_file)
    data = run.data
    if data.source is not None:
        return corpus_tokenizer(ensure_builtin(data.source, data.tokenizer, data.cache_dir, run.model.vocab_size))
    if data.train and read_manifest(data.train[0].path) is not None:
        return corpus_tokenizer(data.train[0].path)
    return load_tokenizer(data.tokenizer) if data.tokenizer is not None else None


def _check_tokenizer(file: Path, model: ModelConfig) -> None:
    if not file.is_file():
        return
    try:
        known = max(Tokenizer.from_file(str(file)).get_vocab().values(), default=-1) + 1
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{file} is no tokenizer.json of the tokenizers library: {error}") from error
    if known > model.vocab_size:
        raise UserError(
            f"{file} has {known} tokens, and the model's embedding {model.vocab_size}: it is another model's tokenizer"
        )
