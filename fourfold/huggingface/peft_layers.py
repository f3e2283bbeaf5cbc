"""Convert the LoRA layers of the peft library to layers that the grid can split."""

from typing import Any

from torch import nn

from fourfold.config.low_rank import LoRAConfig
from fourfold.errors import UserError
from fourfold.models.lora import ADAPTERS, LoRALinear

PREFIX = "base_model.model."
"""peft's files add this prefix to the names of a model's modules."""


def take_adapters(model: nn.Module) -> tuple[nn.Module, Any]:
    """Replace peft's layers in a model by ``LoRALinear``, in place.

    Args:
        model: Any model. A model without adapters of peft is returned unchanged.

    Returns:
        The model without peft's wrapper, and peft's configuration of the adapters. The configuration is None if the
        model has no adapters.

    Raises:
        UserError: The adapters are not plain LoRA adapters of linear layers, or peft trains other weights too.
    """
    configs: Any = getattr(model, "peft_config", None)
    if not configs:
        return model, None
    if len(configs) > 1:
        raise UserError(
            f"the model has several adapters of peft ({', '.join(configs)}); call delete_adapter for all adapters but "
            "one"
        )
    (config,) = configs.values()
    if config.peft_type != "LORA":
        raise UserError(f"the model has adapters of type {config.peft_type}, but parallelize trains LoRA adapters only")
    inner: nn.Module = getattr(model, "get_base_model", lambda: model)()
    for name, layer in dict(inner.named_modules()).items():
        if hasattr(layer, "base_layer"):
            inner.set_submodule(name, _converted(name, layer))
    trained = [name for name, parameter in inner.named_parameters() if parameter.requires_grad]
    if unsupported := [name for name in trained if not is_adapter(name)]:
        raise UserError(
            f"peft also trains {unsupported[0]}, but parallelize trains LoRA adapters only; leave out "
            "modules_to_save, and set bias = 'none'"
        )
    return inner, config


def is_adapter(name: str) -> bool:
    """Return whether this is the name of an adapter's matrix, A or B."""
    return name.rpartition(".")[2] in ADAPTERS


def name_in_files(name: str) -> str:
    """Return the name of an adapter's matrix in peft's files."""
    return f"{PREFIX}{name}.weight"


def _converted(name: str, layer: Any) -> LoRALinear:
    """Return a ``LoRALinear`` with the weights of peft's layer."""
    base, adapter = layer.base_layer, next(iter(getattr(layer, "lora_A", ())), "")
    problems: dict[str, Any] = {
        f"adapts a {type(base).__name__}": type(base) is not nn.Linear or not adapter,
        "has lora_dropout": adapter and getattr(layer.lora_dropout[adapter], "p", 0.0) > 0,
        "has a variant of LoRA, such as DoRA": adapter and layer.lora_variant.get(adapter) is not None,
        "has lora_bias": adapter and layer.lora_B[adapter].bias is not None,
        "is merged or inactive": adapter and (layer.merged or layer.disable_adapters),
    }
    for problem, is_found in problems.items():
        if is_found:
            raise UserError(f"{name}: parallelize splits plain LoRA adapters of nn.Linear, but this adapter {problem}")
    a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    linear = LoRALinear(base, LoRAConfig(rank=len(a), alpha=layer.lora_alpha[adapter]), a.dtype)
    linear.lora_A, linear.lora_B, linear.scale = a, b, layer.scaling[adapter]
    return linear
