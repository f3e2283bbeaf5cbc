"""LoRA: freeze a decoder, and train small adapters on its linear layers (Hu et al. 2021, arXiv 2106.09685)."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.config.low_rank import LoRAConfig
from fourfold.config.model import ModelConfig
from fourfold.errors import UserError
from fourfold.models.transformer import Transformer

ADAPTERS = ("lora_A", "lora_B")
NEVER_ADAPTED = "shared_expert_gate"
"""Name suffix of a layer that gets no adapter. It has only one output, so an adapter would be larger than the layer."""


class LoRALinear(nn.Linear):
    """Computes x Wᵀ + b + α/r · (x Aᵀ) Bᵀ (arXiv 2106.09685, eq. 3), with A [r, in] and B [out, r]."""

    def __init__(self, linear: nn.Linear, config: LoRAConfig, dtype: torch.dtype) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias, self.scale = linear.weight, linear.bias, config.alpha / config.rank
        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(config.rank, linear.in_features, dtype=dtype, device=device))
        self.lora_B = nn.Parameter(torch.empty(linear.out_features, config.rank, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_A), self.lora_B)


def add_adapters(model: Transformer, config: LoRAConfig, dtype: torch.dtype = torch.float32) -> None:
    """Freeze a model or pipeline stage, and add adapters to the layers that ``config.targets`` names. If ``targets`` is
    None, add adapters to all linear layers except ``NEVER_ADAPTED``."""
    model.requires_grad_(False)
    for name, linear in _linears(model).items():
        if config.targets is None or name.rpartition(".")[2] in config.targets:
            model.set_submodule(name, LoRALinear(linear, config, dtype))


def check_targets(model: ModelConfig, config: LoRAConfig, stages: Sequence[range]) -> None:
    """Check that the model has every layer that ``lora.targets`` names, and that each pipeline stage has an adapter.

    Args:
        model: The full model.
        config: The section [lora].
        stages: The indices of the layers in each pipeline stage.

    Raises:
        UserError: A target names no layer of the model, or a stage would have nothing to train.
    """
    targets = config.targets or ()
    with torch.device("meta"):
        kinds = [{name.rpartition(".")[2] for name in _linears(Transformer(model, layers))} for layers in stages]
    for target in targets:
        if target not in (found := set().union(*kinds)):
            experts = " outside of experts, which get no adapters" if model.num_experts else ""
            raise UserError(f"lora.targets: this model has no {target}{experts}; it has {', '.join(sorted(found))}")
    if targets and any(found.isdisjoint(targets) for found in kinds):
        raise UserError(
            f"lora.targets: a pipeline stage has no {' or '.join(targets)}, so it would train nothing; add "
            f"{min(set.intersection(*kinds))}, or lower parallel.pp"
        )


def trained_shapes(model: ModelConfig, config: LoRAConfig | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of every trained parameter. With LoRA, these are only the adapters."""
    with torch.device("meta"):
        whole = Transformer(model)
    if config is not None and config.rank:
        add_adapters(whole, config)
    return {name: tuple(p.shape) for name, p in whole.named_parameters() if p.requires_grad}


def _linears(model: Transformer) -> dict[str, nn.Linear]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(NEVER_ADAPTED)
    }
