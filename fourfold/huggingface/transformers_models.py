"""Models and tokenizers of the transformers library, opened for inference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from fourfold.data.tokenizer import ByteTokenizer
from fourfold.errors import UserError
from fourfold.extras import import_extra
from fourfold.models.dtypes import DTYPES


class TextTokenizer(Protocol):
    """Text to ids and back; ``eos_ids`` end a text."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with what the model expects in front of it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, without special tokens."""
        ...


class HuggingFaceText:
    """The tokenizer of a folder or an id of the Hub, with the special tokens that it puts around a text."""

    def __init__(self, name: str) -> None:
        self.tokenizer = open_tokenizer(name)
        end = self.tokenizer.eos_token_id
        self.eos_ids: tuple[int, ...] = () if end is None else (end,)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class BytesText:
    """The 256 bytes, and one id that ends a text: what runs without a tokenizer are trained on."""

    def __init__(self) -> None:
        self._tokenizer = ByteTokenizer()
        self.eos_ids: tuple[int, ...] = (self._tokenizer.eod_id,)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch([text])[0]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


def open_tokenizer(name: str) -> Any:
    """The transformers tokenizer of a folder or an id of the Hub. Raises ``UserError`` where there is none."""
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise UserError(_no_tokenizer(name, _first_line(error))) from error
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # made of nothing but the model's type
        raise UserError(_no_tokenizer(name, "it has no vocabulary"))
    return tokenizer


def load_text(name: str) -> TextTokenizer:
    """The tokenizer of a model's folder, of an id of the Hub, or "bytes"."""
    return BytesText() if name == "bytes" else HuggingFaceText(name)


def load_model(name: str | Path, dtype: str = "auto", device: str | None = None) -> Any:
    """A causal language model of the transformers library, ready to generate; no code of the model is run.

    dtype: fp32, bf16, fp16, or auto for the one in which it is stored. device: by default a GPU where there is one.
    Raises ``UserError`` when it cannot be loaded.
    """
    transformers = import_transformers()
    wanted = "auto" if dtype == "auto" else DTYPES[dtype]
    device = checked_device(device)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # no table of keys: the one kind that matters is an error below
    try:
        model, keys = transformers.AutoModelForCausalLM.from_pretrained(
            str(name), dtype=wanted, use_safetensors=True, output_loading_info=True
        )
        model = model.to(device).eval()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"cannot load the model {name}: {_first_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    if keys["missing_keys"]:
        raise UserError(f"cannot load the model {name}: its files lack the tensor {min(keys['missing_keys'])}")
    return model


def checked_device(name: str | None) -> str:
    """A device that there is; by default a GPU, where there is one."""
    is_there = torch.cuda.is_available()
    name = name or ("cuda" if is_there else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise UserError(f"--device {name} is neither cpu nor cuda")
    if kind == "cuda" and (not is_there or int(number or 0) >= torch.cuda.device_count()):
        raise UserError(f"--device {name}: torch sees no such GPU here; give --device cpu")
    return name


def checked_ids(model: Any, ids: Sequence[int]) -> Sequence[int]:
    """The same ids. Raises ``UserError`` where the model has no such tokens."""
    known = model.get_input_embeddings().num_embeddings
    if ids and max(ids) >= known:
        raise UserError(
            f"the tokenizer gives the id {max(ids)}, and the model knows {known} tokens; name its own with --tokenizer"
        )
    return ids


def positions_of(model: Any) -> int | None:
    """The longest sequence that a model knows; None where it does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def import_transformers() -> Any:
    """Import the transformers library, without its progress bars."""
    transformers = import_extra("transformers", "huggingface", "Hugging Face models need")
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _no_tokenizer(name: str, reason: str) -> str:
    return f"cannot load the tokenizer of {name} ({reason}); name one with --tokenizer: a folder, or bytes"


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
