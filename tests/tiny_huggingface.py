"""Build small random models of the transformers library, one for every family, and read their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_dense_models import DENSE, GPT2, SIZES
from tiny_mixtures import MIXTURES
from torch import Tensor

from fourfold.huggingface.architectures.config_json import model_of, read_config
from fourfold.huggingface.weights import Pretrained
from fourfold.models.transformer import Transformer

MODELS = DENSE | MIXTURES


def make_model(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Save a model in several files, and return its folder. The weights are random but the same in every call, and
    every parameter affects the results."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    kind, keys = MODELS[name]
    sizes = GPT2 if kind == "GPT2Config" else SIZES
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(sizes | keys | changes)))
    perturb(model)
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB")
    return folder


def perturb(model: Any) -> None:
    """Change the vectors of a new model. In a new model, every vector is all ones or all zeros, so a mistake with a
    vector would not show."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape, generator=generator)


def ours_of(folder: Path) -> Transformer:
    """Return our decoder with the weights of a Hugging Face model."""
    model = Transformer(model_of(read_config(folder), str(folder)))
    pretrained = Pretrained(folder, model.config)
    for name, parameter in model.named_parameters():
        pretrained.read_into(parameter.data, name, tuple(slice(0, n) for n in parameter.shape))
    return model


def weights_of(folder: Path) -> dict[str, Tensor]:
    """Return all weights in the files of a folder."""
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def rewrite(folder: Path, weights: dict[str, Tensor]) -> None:
    """Replace a folder's weights."""
    for file in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        file.unlink(missing_ok=True)
    save_file(weights, folder / "model.safetensors")


def tokens() -> Tensor:
    """Return two sequences of random tokens."""
    return torch.randint(201, (2, 40), generator=torch.Generator().manual_seed(0))
