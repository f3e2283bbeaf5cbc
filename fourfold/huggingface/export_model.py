"""Export checkpoints as a folder that transformers opens, or as an adapter that peft opens."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from fourfold.checkpoints.find_checkpoints import STATE_FILE, newest_checkpoint
from fourfold.checkpoints.saved_weights import SavedWeights
from fourfold.config.model import ModelConfig
from fourfold.data.atomic_files import new_folder, write_whole
from fourfold.data.run_data import open_run_tokenizer
from fourfold.data.tokenizer import Tokenizer, load_tokenizer
from fourfold.errors import UserError, given_as
from fourfold.huggingface.adapters import Merged, open_base, write_adapter
from fourfold.huggingface.architectures.config_json import CONFIG_FILE, QUANTIZED, local_folder, read_config
from fourfold.huggingface.architectures.written_config import config_of, same_model
from fourfold.huggingface.model_folder import (
    GENERATION_FILE,
    PATTERNS,
    SMALL_FILES,
    TOKENIZER_FILE,
    Transferred,
    count_parameters,
    keep_small_files,
    source_of,
)
from fourfold.huggingface.tokenizer_file import add_end_token, write_tokenizer
from fourfold.huggingface.weight_names import TheirTensor, name_map
from fourfold.models.dtypes import DTYPES
from fourfold.models.mixture import is_router_bias
from fourfold.models.tensor_files import Entry, write_tensor_files
from fourfold.run_file.load import load_run
from fourfold.untrusted_files import check_no_adapter

_TYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
"""Maps the names of dtypes in config.json to torch's dtypes."""


def export_huggingface(
    checkpoint: Path,
    out: Path,
    dtype: str = "auto",
    kind: str | None = None,
    tokenizer: str | None = None,
    merge: bool = False,
    averaged: bool = False,
) -> Transferred:
    """Convert a checkpoint that any grid has written to a folder that transformers can open. One tensor is in memory at
    a time.

    A checkpoint of LoRA adapters becomes a folder that peft can open. With ``merge``, it becomes the base model, merged
    with the adapters. In the list below, the original model is the Hugging Face model that the run started from.

    Args:
        checkpoint: The checkpoint's folder.
        out: The folder to write.
        dtype: Dtype of the weights. "auto" uses the dtype of the original model if the run started from one, and
            otherwise the stored dtypes.
        kind: The model_type to write. The default is the model_type of the original model. If there is no original
            model, the default is the first supported model_type that can compute the model.
        tokenizer: A tokenizer.json. By default the original model's tokenizer files are copied, or the corpus's
            tokenizer if there is no original model.
        merge: Whether to merge adapters into their base model.
        averaged: Whether to write the moving average of the weights ([ema]) instead of the weights.

    Returns:
        A record of the model and the sizes of the files.

    Raises:
        UserError: There is no undamaged checkpoint, no supported model_type can compute the model, an option does not
            fit the model, or ``out`` exists.
    """
    checkpoint = _newest(checkpoint)
    saved = SavedWeights(checkpoint, averaged)
    if merge and saved.state.lora is None:
        raise UserError(f"the checkpoint {checkpoint} holds a whole model; there are no adapters to merge")
    if saved.state.lora is not None and not merge:
        given = {"--dtype": dtype != "auto", "--model-type": kind is not None, "--tokenizer": tokenizer is not None}
        for option in (name for name, is_given in given.items() if is_given):
            raise UserError(f"{option} is for a whole model, and {checkpoint} holds adapters; export them with --merge")
        return _export_adapter(checkpoint, saved, out)
    weights = Merged(saved, open_base(saved)) if merge else saved
    source = source_of(checkpoint)
    model = saved.model.model_copy(update={"num_nextn_predict_layers": 0})  # transformers has no such layers.
    config = _config(model, source, kind)
    types = dict(weights.dtypes)
    wanted = DTYPES.get(dtype)
    if wanted is None and source is not None and not saved.state.weights_only:
        wanted = _TYPE_NAMES.get(str(config.get("dtype", config.get("torch_dtype"))))
    if wanted is not None:
        # Keep the stored dtype of a router's bias, because transformers also keeps this bias in float32.
        types = {name: each if is_router_bias(name) else wanted for name, each in types.items()}
    if source is None or wanted is not None or not saved.state.weights_only:
        key = "dtype" if "dtype" in config else "torch_dtype"
        config[key] = next(name for name, each in _TYPE_NAMES.items() if each == types["embed_tokens.weight"])
    entries = []
    tensors = name_map(config["model_type"], model)
    for tensor in tensors:
        make = partial(_joined, weights, tensor, types[tensor.pieces[0].name])
        entries.append(Entry(tensor.name, types[tensor.pieces[0].name], tensor.shape, make))
    has_tokenizer = True
    with new_folder(out) as partial_folder:
        if source is not None:
            keep_small_files(source, partial_folder)
        if source is None or tokenizer is not None:
            found = load_tokenizer(tokenizer) if tokenizer is not None else _tokenizer_of(checkpoint)
            has_tokenizer = found is not None
            config |= write_tokenizer(partial_folder, found, saved.model)
        config = _with_trained_end(checkpoint, partial_folder, config)
        write_whole(partial_folder / CONFIG_FILE, (json.dumps(config, indent=2) + "\n").encode())
        files = write_tensor_files(partial_folder, entries)
    return Transferred(str(out), config["model_type"], count_parameters(tensors), files, has_tokenizer)


def _with_trained_end(checkpoint: Path, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    # The tokenizer cannot be found if the run's corpora or its original model no longer exist.
    with suppress(UserError):
        trained = _tokenizer_of(checkpoint)
        return config if trained is None else add_end_token(folder, config, trained.eod_id)
    return config


def _export_adapter(checkpoint: Path, saved: SavedWeights, out: Path) -> Transferred:
    base = open_base(saved)
    with new_folder(out) as partial_folder:
        files = write_adapter(partial_folder, saved, base)
        source = source_of(checkpoint)
        if source is not None:
            keep_small_files(
                source, partial_folder, [n for n in SMALL_FILES if n not in (CONFIG_FILE, GENERATION_FILE)]
            )
    return Transferred(str(out), f"LoRA of {base.kind}", sum(map(math.prod, saved.shapes.values())), files)


@contextmanager
def as_huggingface(name: str) -> Iterator[tuple[str, str | None]]:
    """Yield the folder of a model that transformers can open, and the folder of its tokenizer. The second value is
    "bytes" for the bytes tokenizer, and None if the tokenizer is unknown.

    A checkpoint or run of fourfold is exported into a temporary folder that exists while the block runs. The dtypes are
    the default dtypes of ``export_huggingface``, and adapters are merged.

    Raises:
        UserError: There is no model with that name.
    """
    path = Path(name).expanduser()
    if not path.is_dir() or (path / CONFIG_FILE).exists():
        with given_as("--model"):
            found = str(local_folder(name, PATTERNS))
        yield found, found
        return
    checkpoint = _newest(path)
    with TemporaryDirectory(prefix="fourfold-") as temporary:
        folder = Path(temporary, "model")
        export_huggingface(checkpoint, folder, merge=SavedWeights(checkpoint).state.lora is not None)
        if (folder / TOKENIZER_FILE).is_file():
            yield str(folder), str(folder)
        else:
            yield str(folder), "bytes" if _tokenizer_of(checkpoint) is not None else None


def _joined(weights: SavedWeights | Merged, tensor: TheirTensor, dtype: torch.dtype) -> Tensor:
    return tensor.joined([weights.read(piece.name, piece.expert).to(dtype) for piece in tensor.pieces])


def _newest(path: Path) -> Path:
    checkpoint = newest_checkpoint(path)
    if checkpoint is None:
        check_no_adapter(path)
        raise UserError(
            f"{path} is neither a checkpoint (a folder with {STATE_FILE}) nor the folder of a run with a checkpoint"
        )
    return checkpoint


def _config(model: ModelConfig, source: Path | None, kind: str | None) -> dict[str, Any]:
    """Return the config.json to write. If the original model's config.json still describes the model and has the wanted
    ``kind``, return it without its quantization. Otherwise create a new config.json."""
    if source is None:
        return config_of(model, kind)
    original = {key: value for key, value in read_config(source).items() if key != QUANTIZED}
    if kind in (None, original["model_type"]) and same_model(model, original):
        return original
    kept = {key: value for key, value in original.items() if key.endswith("_token_id")}
    return config_of(model, kind or original["model_type"]) | kept


def _tokenizer_of(checkpoint: Path) -> Tokenizer | None:
    """Return the tokenizer of the run that wrote a checkpoint, if its run file exists and names one."""
    run_file = checkpoint.resolve().parent.parent / "run.toml"
    return open_run_tokenizer(load_run(run_file)) if run_file.is_file() else None
