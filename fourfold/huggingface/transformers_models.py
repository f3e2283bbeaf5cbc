"""Open models of the transformers library for inference."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from fourfold.data.transformers_tokenizer import FOREIGN_ERRORS, import_transformers, needs_its_code
from fourfold.errors import UserError, first_line
from fourfold.huggingface.file_formats import BUFFERS, FORMATS
from fourfold.huggingface.model_folder import GENERATION_FILE
from fourfold.models.dtypes import DTYPES
from fourfold.parsing import parse_json
from fourfold.untrusted_files import check_model_folder

SEVERAL_SEQUENCES = ("num_return_sequences", "num_beams", "num_beam_groups", "early_stopping", "length_penalty")
"""Keys of a generation_config.json that matter only when several sequences are generated."""


def load_model(name: str | Path, dtype: str = "auto", device: str | None = None) -> Any:
    """Load a causal language model of the transformers library, ready to generate. Code that comes with the model is
    never run.

    Args:
        name: A folder, or an id on the Hub.
        dtype: fp32, bf16, fp16, or auto for the stored dtype.
        device: The device, by default a GPU if there is one.

    Returns:
        The model.

    Raises:
        UserError: The model cannot be loaded, its weights do not fit its config.json, or it attends to later tokens.
    """
    if Path(name).is_dir():
        check_model_folder(Path(name))
    transformers = import_transformers()
    wanted = "auto" if dtype == "auto" else DTYPES[dtype]
    device = checked_device(device)
    verbosity = transformers.logging.get_verbosity()
    # Do not print transformers' table of missing and unexpected weights. The code below checks them.
    transformers.logging.set_verbosity_error()
    try:
        settings = _generation_settings(Path(name), transformers)
        model, keys = transformers.AutoModelForCausalLM.from_pretrained(
            str(name),
            dtype=wanted,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            generation_config=settings,
        )
        if getattr(model.config, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # Before transformers 5.21, sdpa ignores the soft-cap.
        model = model.to(device).eval()
    except (*FOREIGN_ERRORS, SafetensorError) as error:
        raise UserError(f"cannot load the model {name}: {needs_its_code(error) or first_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)
    if keys["missing_keys"]:
        raise UserError(f"cannot load the model {name}: its files lack the tensor {min(keys['missing_keys'])}")
    config = model.config
    known = FORMATS.get(config.model_type)
    beyond = known.names_beyond(config.num_hidden_layers, config.to_dict()) if known is not None else ()
    surplus = [key for key in keys["unexpected_keys"] if not key.startswith(beyond) and not key.endswith(BUFFERS)]
    if surplus:
        raise UserError(f"cannot load the model {name}: its config.json has no place for the tensor {min(surplus)}")
    if not _is_causal(model):
        raise UserError(
            f"the model {name} is not causal: its predictions depend on later tokens, for example because config.json "
            "has is_causal = false; a causal language model works"
        )
    return model


@torch.no_grad()
def _is_causal(model: Any) -> bool:
    """Return whether two texts that differ only at their ends have the same logits at their beginnings, up to
    rounding."""
    tokens_2S = torch.tensor([[0, 1, 2, 3], [0, 4, 5, 6]], device=model.device) % model.config.vocab_size
    one_V, other_V = model(input_ids=tokens_2S, use_cache=False).logits[:, 0].float()
    # Write the condition so that NaN logits pass. Another check refuses them.
    return not (one_V - other_V).abs().max() > 0.05 * one_V.abs().max()


def _generation_settings(folder: Path, transformers: Any) -> Any:
    """Return the settings in a folder's generation_config.json, without settings for several sequences. Return None if
    the folder has no such file."""
    file = folder / GENERATION_FILE
    if not file.is_file():
        return None
    settings = parse_json(file.read_bytes())
    if not isinstance(settings, dict):
        raise ValueError(f"{file} is not a table of settings")
    # Leave out requests for several sequences, because transformers refuses them if other settings allow only one.
    return transformers.GenerationConfig(**{key: settings[key] for key in settings if key not in SEVERAL_SEQUENCES})


def checked_device(name: str | None) -> str:
    """Return the name of a device, after checking that this machine has it. The default is a GPU if there is one."""
    is_there = torch.cuda.is_available()
    name = name or ("cuda" if is_there else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise UserError(f"--device {name} is neither cpu nor cuda")
    if kind == "cuda" and (not is_there or int(number or 0) >= torch.cuda.device_count()):
        raise UserError(f"--device {name}: torch sees no such GPU here; give --device cpu")
    return name


def checked_ids(model: Any, ids: list[int]) -> list[int]:
    """Return the ids unchanged. Raise ``UserError`` if the model does not have all these tokens."""
    known = model.get_input_embeddings().num_embeddings
    if ids and max(ids) >= known:
        raise UserError(
            f"the tokenizer gives the id {max(ids)}, but the model knows {known} tokens; name the model's own "
            "tokenizer with --tokenizer"
        )
    return ids


def positions_of(model: Any) -> int | None:
    """Return the length of the longest sequence that a model supports, or None if its configuration does not say."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
