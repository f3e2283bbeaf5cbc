"""Choose which parts of a decoder are recomputed in the backward pass, and which parts are compiled."""

import torch
from torch import nn

from fourfold.config.activation_checkpoint import ActivationCheckpointConfig
from fourfold.config.run import ParallelConfig
from fourfold.models.delta_net import DeltaNet
from fourfold.models.mlp import MLP
from fourfold.models.recomputation import recompute_method
from fourfold.models.transformer import AttentionAndMLP, Transformer
from fourfold.parallel.tensor.linear import Linear4D

SELECTIVE = {
    "attention": ("self_attn.core.forward",),
    "mlp": ("mlp.down",),
    "norms": ("input_layernorm.forward", "post_attention_layernorm.forward"),
}
"""Maps each name in the run file's ``activation_checkpoint.modules`` to the methods of a block that are recomputed.

``mlp.down`` applies the activation and then multiplies. Only the activation is recomputed, because the backward pass
does not read the matmul's output.
"""


def recompute(model: Transformer, config: ActivationCheckpointConfig) -> None:
    """Turn on activation checkpointing for every n-th block (``config.every``).

    - Mode "full" recomputes whole blocks. With ``config.offload``, the module ``offload`` does this instead.
    - Mode "selective" recomputes the parts of a block that ``config.modules`` names. For "gathers", each linear layer
      keeps only this rank's share of its input, and gathers the input again in the backward pass.
    - The core of linear attention is always recomputed, in all blocks, because its intermediate values are many times
      larger than its inputs.
    """
    for place, block in enumerate(model.blocks):
        is_whole = config.mode == "full" and place % config.every == 0
        if isinstance(block.self_attn, DeltaNet) and not is_whole:
            recompute_method(block.self_attn.core, "forward")
    for block in model.blocks[:: config.every]:
        if config.mode == "full" and not config.offload:
            recompute_method(block, "add_outputs")
        elif config.mode == "selective":
            for path in (path for name in config.modules for path in _methods(block, name)):
                module, _, method = path.rpartition(".")
                recompute_method(block.get_submodule(module), method)
            if "gathers" in config.modules:
                for linear in (module for module in block.modules() if isinstance(module, Linear4D)):
                    linear.gather_again = True


def _methods(block: AttentionAndMLP, name: str) -> tuple[str, ...]:
    """Return the methods of a block that a name in ``activation_checkpoint.modules`` stands for."""
    if name != "mlp" or isinstance(block.mlp, MLP):
        modules = dict(block.named_modules())
        return tuple(path for path in SELECTIVE.get(name, ()) if path.rpartition(".")[0] in modules)
    return ("mlp.experts.down", *(("mlp.shared_expert.down",) if block.mlp.shared_expert is not None else ()))


def compile_blocks(model: Transformer, grid: ParallelConfig) -> None:
    """Compile whole blocks if they contain no collectives.

    Otherwise compile the activation of the MLP, and the attention core if cp has size 1.
    """
    for block in model.blocks:
        if grid.x * grid.y * grid.cp == 1:
            _compile(block)
            continue
        assert isinstance(block.mlp, MLP), "blocks with experts are not compiled"
        _compile(block.mlp.activation)
        # All collectives in ``attend_heads`` run over cp. So with cp = 1, this method contains no collectives.
        if grid.cp == 1:
            _compile(block.self_attn.core, "attend_heads")


def _compile(module: nn.Module, method: str = "forward") -> None:
    setattr(module, method, torch.compile(getattr(module, method)))
