"""Training steps of other libraries, which benchmarks compare with fourfold's training step.

All libraries train the same decoder on the same batches, by default from the same initial weights. Each function
returns a ``Step``. A step takes the tokens and labels of the full batch, both [B, S], trains on this process's part of
them, and returns the loss before the update. All libraries use torch's fused AdamW, which is torch's fastest version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from fourfold.config.model import IGNORE_INDEX, ModelConfig
from fourfold.config.run import RunConfig
from fourfold.huggingface.architectures.written_config import config_of
from fourfold.huggingface.expert_files import in_modules, rows_in_files
from fourfold.huggingface.weight_names import name_map
from fourfold.models.initialize import initialize
from fourfold.models.rope import apply_rope, rope_frequencies, rope_tables
from fourfold.models.transformer import Transformer

Step = Callable[[Tensor, Tensor], Tensor]


def adamw(run: RunConfig, parameters: Any) -> torch.optim.AdamW:
    """Return torch's AdamW with the run's settings. All parameters have the same settings."""
    options = run.optimizer
    return torch.optim.AdamW(
        parameters, lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay, fused=True
    )


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return the run's initial weights, under the names that Hugging Face's files use."""
    model = Transformer(config)
    initialize(model, config, seed)
    ours = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors = name_map(config_of(config)["model_type"], config)
    return {t.name: t.joined([piece.of(ours[piece.name]) for piece in t.pieces]) for t in tensors}


def hugging_face(
    run: RunConfig,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    compiled: bool = False,
    same_weights: bool = True,
    experts: str | None = None,
) -> Step:
    """Return a step of the ``transformers`` model with its default attention (SDPA), in a plain training loop.

    Args:
        dtype: Dtype of the weights.
        autocast: Dtype in which torch.autocast runs matmuls. None runs them in ``dtype``.
        compiled: Whether to compile the model with torch.compile.
        same_weights: Whether to start from the run's initial weights. If False, the library draws its own weights,
            which is faster for a large model.
        experts: How the library computes a mixture of experts: with a loop ("eager") or with grouped matmuls
            ("grouped_mm").
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**config_of(run.model), use_cache=False)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, experts_implementation=experts)
    assert model.config._attn_implementation == "sdpa"
    if same_weights:
        weights = initial_weights(run.model, run.training.seed)
        model.load_state_dict(in_modules(model, rows_in_files(model), weights))
    model.to(dtype)
    model.train()
    optimizer = adamw(run, model.parameters())
    forward = torch.compile(model) if compiled else model

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, autocast, enabled=autocast is not None):
            # transformers shifts the labels by one token itself, so pass the tokens.
            loss = forward(input_ids=tokens_BS, labels=tokens_BS).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return step


def my_rows(batch_BS: Tensor, rank: int, ranks: int) -> Tensor:
    """Return this rank's sequences of the batch."""
    return batch_BS.chunk(ranks)[rank]


def distributed_data_parallel(run: RunConfig) -> Step:
    """Return a step of fourfold's own single-device model, with its plain loss, in torch's DistributedDataParallel."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = Transformer(run.model)
    initialize(model, run.model, run.training.seed)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = adamw(run, model.parameters())

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        optimizer.zero_grad()
        kept = (labels_BS != IGNORE_INDEX).sum()
        loss = parallel(my_rows(tokens_BS, rank, ranks), my_rows(labels_BS, rank, ranks)) / kept
        # DDP divides the summed gradients by the number of ranks. Multiply the loss by this number to undo that.
        (loss * ranks).backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.max_grad_norm)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total

    return step


class PlainAttention(nn.Module):
    """Attention that works with any number of heads. With tensor parallelism, each rank has some of the heads, so the
    number of heads comes from the outputs of the projections."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (proj(x_BSH).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class PlainMLP(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_BSH)) * self.up_proj(x_BSH))


class PlainBlock(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.norm_eps)
        self.self_attn = PlainAttention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.norm_eps)
        self.mlp = PlainMLP(c)

    def forward(self, x_BSH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), cos, sin)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


class PlainLlama(nn.Module):
    """A Llama without any parallelism. Its modules are split up so that ``parallelize_module`` can shard each of
    them."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.padded_vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(c) for _ in range(c.num_hidden_layers))
        self.norm = nn.RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.padded_vocab_size, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        frequencies, scale = rope_frequencies(self.config, tokens_BS.device)
        cos, sin = rope_tables(torch.arange(tokens_BS.shape[1], device=tokens_BS.device)[None], frequencies, scale)
        x_BSH = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH, cos, sin)
        return self.lm_head(self.norm(x_BSH))


def fsdp2_tensor_parallel(run: RunConfig, device_type: str = "cpu") -> Step:
    """Return a step with torch's FSDP2 and tensor parallelism (DTensor, with sequence and loss parallelism), which are
    combined as in torchtitan.

    The run's x is the size of tensor parallelism, and its z is the size of FSDP2.
    """
    mesh = init_device_mesh(device_type, (run.parallel.z, run.parallel.x), mesh_dim_names=("fsdp", "tp"))
    model = PlainLlama(run.model)
    weights = initial_weights(run.model, run.training.seed)
    model.load_state_dict({name.removeprefix("model."): weight for name, weight in weights.items()})
    parallelize_module(
        model,
        mesh["tp"],
        {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers:
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "input_layernorm": SequenceParallel(),
                "self_attn": PrepareModuleInput(
                    input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
                ),
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
                "post_attention_layernorm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["fsdp"], mp_policy=MixedPrecisionPolicy())
    fully_shard([model.norm, model.lm_head], mesh=mesh["fsdp"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["fsdp"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # By default, FSDP2 scales the sum of gradients inside the collective, which gloo cannot do.
            module.set_force_sum_reduction_for_comms(True)
    optimizer = adamw(run, model.parameters())
    rank, ranks, group = mesh["fsdp"].get_local_rank(), run.parallel.z, mesh["fsdp"].get_group()

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        optimizer.zero_grad()
        kept = (labels_BS != IGNORE_INDEX).sum()
        with loss_parallel():
            logits_BSV = model(my_rows(tokens_BS, rank, ranks))
            labels_N = my_rows(labels_BS, rank, ranks).flatten()
            loss = F.cross_entropy(
                logits_BSV.flatten(0, 1).float(), labels_N, ignore_index=IGNORE_INDEX, reduction="sum"
            )
            loss = loss / kept
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.max_grad_norm)
        total = loss.detach()
        assert isinstance(norm, DTensor) and isinstance(total, DTensor)
        norm.full_tensor()
        optimizer.step()
        total = total.full_tensor()
        dist.all_reduce(total, group=group)
        return total

    return step
