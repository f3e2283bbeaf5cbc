"""Put a decoder on the grid. ``parallelize_decoder`` replaces the decoder's layers with parallel layers, and then
applies the run file's options for matmul layouts, float8, batch parts, recompute, compilation, offload, and sharding.
"""

import fnmatch
from collections.abc import Callable
from typing import Any

from torch import nn

from fourfold.config.layout import attention_split, context_method
from fourfold.config.run import RunConfig
from fourfold.models.causal_attention import AttentionCore
from fourfold.models.delta_net import DeltaCore
from fourfold.models.latent_attention import LatentCore
from fourfold.models.transformer import Transformer
from fourfold.parallel.attention.attention import OVER_Y, SharedAttentionCore
from fourfold.parallel.attention.context import DocumentTables
from fourfold.parallel.attention.delta_core import SharedDeltaCore
from fourfold.parallel.attention.latent_core import LatentLinear, SharedLatentCore
from fourfold.parallel.data.data_parallel import DataParallel, StepTypes, units_of
from fourfold.parallel.experts.experts import ParallelMixture
from fourfold.parallel.grid.grid import Grid
from fourfold.parallel.grid_model import replicate_or_shard
from fourfold.parallel.memory.offload import offload_inputs
from fourfold.parallel.memory.recompute import compile_blocks, recompute
from fourfold.parallel.overlap.batch_parts import run_in_parts
from fourfold.parallel.tensor.embedding import Embedding
from fourfold.parallel.tensor.float8 import use_float8
from fourfold.parallel.tensor.head import ParallelHead
from fourfold.parallel.tensor.linear import Linear4D, LinearGroup
from fourfold.parallel.tensor.matmul_layouts import Layouts, lay_out_matmuls
from fourfold.parallel.tensor.norm import Norm
from fourfold.parallel.tensor.preference_head import PreferenceHead
from fourfold.parallel.tensor.sharding import Tiled, tie_again, tied_names

Rules = dict[str, Callable[[str, Any], nn.Module]]
"""Maps a pattern of module names to a function that takes a name and a module, and returns the replacement."""


def parallelize_decoder(model: Transformer, grid: Grid, run: RunConfig, layouts: Layouts | None = None) -> DataParallel:
    """Replace the model's layers with layers that hold only this process's tiles. The model stays on the meta device.

    Args:
        model: the decoder, or one of its pipeline stages, on the meta device.
        grid: the grid.
        run: the run file.
        layouts: the memory layouts of the matmuls in the blocks. Every process must pass the same layouts.

    Returns:
        The model, with its weights sharded or replicated over the ranks of dp·cp·z.
    """
    tied = tied_names(model)
    apply_rules(model, tensor_rules(grid, run, own_matmuls=bool(layouts)))
    tie_again(model, tied)
    if grid.x.size * grid.y.size > 1:
        assert_nothing_serial(model)
    if layouts:
        lay_out_matmuls(model, layouts)
    if run.training.float8 != "none":
        use_float8(model, run.training.float8)
    if run.overlap.batch_parts > 1 and grid.x.size * grid.y.size > 1:
        # In mode "full", autograd recomputes one block at a time, so a batch part must not run ahead into the next
        # block.
        across_blocks = run.activation_checkpoint.mode != "full"
        run_in_parts(model, run.overlap.batch_parts, attention_split(run), grid, across_blocks)
    recompute(model, run.activation_checkpoint)
    if run.training.compile:
        compile_blocks(model, run.parallel)
    if run.activation_checkpoint.offload:
        offload_inputs(model, run.activation_checkpoint)
    units, types = units_of(model), StepTypes.of(run.training)
    prefetch, per_node = run.overlap.weight_prefetch, run.overlap.shards_per_node
    return replicate_or_shard(model, units, grid, types, prefetch, per_node)


def tensor_rules(grid: Grid, run: RunConfig, own_matmuls: bool = False) -> Rules:
    """Return the rules that replace a decoder's modules with layers that are split over the tensor axes x and y.

    If several patterns match a name, the first pattern applies.

    Args:
        own_matmuls: whether to replace all linear layers of the blocks even with x = y = 1, so that these layers can
            use ``Layouts``.
    """
    overlap, model, beta = run.overlap, run.model, run.dpo.beta
    split = attention_split(run)
    mixtures: Rules = {
        f"layers.{layer}.mlp": lambda name, m: ParallelMixture(m, grid, overlap, layer=int(name.split(".")[1]))
        for layer in range(model.num_hidden_layers + model.num_nextn_predict_layers)
        if model.is_sparse(layer)
    }
    inputs_and_head: Rules = mixtures | {
        "layers.*.self_attn.qkv": lambda name, m: LinearGroup(m, grid, OVER_Y[split], "qkv", overlap),
        "layers.*.self_attn.inputs": lambda name, m: LinearGroup(m, grid, OVER_Y[split], "linear attention", overlap),
        "layers.*.mlp.up": lambda name, m: LinearGroup(m, grid, "replicate", "up", overlap),
        "layers.*.[eh]_proj": lambda name, m: LatentLinear(m, grid, "features", "eh_proj", overlap),
        "layers.*layernorm": lambda name, m: Norm(m, grid, "norm"),
        "norm": lambda name, m: Norm(m, grid, "norm"),
        "lm_head": lambda name, m: PreferenceHead(m, grid, beta) if beta else ParallelHead(m, grid),
    }
    if model.kv_lora_rank:
        inputs_and_head |= {
            "layers.*.self_attn.down": lambda name, m: LinearGroup(
                m, grid, "features", "latents", overlap, LatentLinear
            ),
            "layers.*.self_attn.q": lambda name, m: LinearGroup(m, grid, OVER_Y[split], "queries", overlap),
            "layers.*.self_attn.kv": lambda name, m: LinearGroup(m, grid, OVER_Y[split], "keys and values", overlap),
        }
    attention: Rules = {"layers.*.self_attn.core": lambda name, m: _shared_core(m, grid, run)}
    # If the ranks of y split the queries of a sequence, attention needs a mask. DocumentTables creates no masks, so
    # keep the model's own AttentionTables, which creates them.
    if split != "sequence":
        attention["attention_tables"] = lambda name, m: DocumentTables(m.config)
    outputs: Rules = {
        "layers.*.self_attn.o_proj": lambda name, m: Linear4D(
            m, grid, OVER_Y[split], "o_proj", overlap, transposed=True
        ),
        "layers.*.mlp.down_proj": lambda name, m: Linear4D(m, grid, "replicate", "down", overlap, transposed=True),
    }
    if grid.x.size * grid.y.size > 1:
        return inputs_and_head | attention | outputs | {"embed_*": lambda name, m: Embedding(m, grid, name)}
    # With x = y = 1, no layer is split, but parallel layers are still faster than plain modules because they read and
    # write less memory. In compiled blocks, keep the plain modules, because torch.compile makes them as fast.
    compiled = run.training.compile and grid.cp.size == 1
    rules = {"lm_head": inputs_and_head["lm_head"]} if compiled else inputs_and_head
    if own_matmuls:
        rules = rules | outputs
    has_kernel = not (model.sliding_window or model.attn_logit_softcapping or model.attention_sinks)
    is_plain = has_kernel and not run.data.mask_documents
    return rules if grid.cp.size == 1 and is_plain else rules | attention


def _shared_core(core: nn.Module, grid: Grid, run: RunConfig) -> nn.Module:
    """Return the parallel attention core that replaces a layer's plain attention core."""
    split, method, model = attention_split(run), context_method(run), run.model
    if isinstance(core, DeltaCore):
        return SharedDeltaCore(core, grid, split)
    if isinstance(core, LatentCore):
        return SharedLatentCore(core, grid, split, method, model.num_attention_heads)
    assert isinstance(core, AttentionCore)
    return SharedAttentionCore(core, grid, split, method, model.num_attention_heads, model.num_key_value_heads)


def apply_rules(model: nn.Module, rules: Rules, prefix: str = "") -> None:
    """Replace every module whose name matches a rule. Modules inside a replaced module are not searched.

    Args:
        model: the module to search.
        rules: the rules. The first rule that matches a name applies.
        prefix: the text before the names of the model's children: the name of ``model`` and a dot, or "" at the root.
    """
    for name, module in list(model.named_children()):
        full_name = prefix + name
        pattern = next((p for p in rules if fnmatch.fnmatchcase(full_name, p)), None)
        if pattern is not None:
            setattr(model, name, rules[pattern](full_name, module))
        else:
            apply_rules(module, rules, full_name + ".")


def assert_nothing_serial(model: nn.Module) -> None:
    """Assert that every module with parameters is now a parallel layer.

    If a module were not replaced, the sums over x and y would leave out its gradients.
    """
    for name, module in model.named_modules():
        has_parameters = any(True for _ in module.parameters(recurse=False))
        assert not has_parameters or isinstance(module, Tiled), f"no rule replaces {name}"
