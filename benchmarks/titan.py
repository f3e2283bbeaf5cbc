"""A training step of torchtitan's Llama 3, for benchmarks that compare it with fourfold's training step.

The step needs torchtitan 0.3.0, with spmd_types, tyro, docstring_parser, and typeguard. Benchmarks leave the step out
if torchtitan is not installed.
"""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.peers import Step, adamw
from fourfold.config.model import IGNORE_INDEX
from fourfold.config.run import RunConfig


def is_installed() -> bool:
    return find_spec("torchtitan") is not None


def torchtitan(run: RunConfig, device: torch.device, compiled: bool) -> Step:
    """Return a training step of torchtitan on one device. FSDP2 stores the weights in fp32, and matmuls run in bf16. If
    ``compiled`` is true, each block is compiled.

    Attention is torch's SDPA, as in the other libraries of the benchmark. (By default, torchtitan uses a kernel for
    packed documents, but these sequences are not packed.) The step computes the logits of all tokens at once. It uses
    fused AdamW and torchtitan's own initial weights.
    """
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.fsdp import apply_fsdp_to_decoder
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs

    wide = run.model.hidden_size == 4096
    config = llama3_configs["8B" if wide else "debugmodel"](attn_backend="flex")
    config.layers = config.layers[: run.model.num_hidden_layers]
    assert len(config.layers) == run.model.num_hidden_layers
    config.vocab_size = config.tok_embeddings.num_embeddings = config.lm_head.out_features = run.model.vocab_size
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=run.training.seq_length)
    with torch.device("meta"):
        model = config.build()
    if compiled:
        for block in model.layers.values():
            block.compile(fullgraph=True)
    mesh = init_device_mesh(device.type, (1,), mesh_dim_names=("fsdp",))
    apply_fsdp_to_decoder(
        model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False, cpu_offload=False
    )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_states(buffer_device=device)
    model.train()
    optimizer = adamw(run, model.parameters())
    loss_of = CrossEntropyLoss.Config().build(compile_config=CompileConfig(enable=compiled))

    def step(tokens_BS: Tensor, labels_BS: Tensor) -> Tensor:
        optimizer.zero_grad()
        positions_BS = torch.arange(tokens_BS.shape[1], device=device).expand(tokens_BS.shape)
        kept = (labels_BS != IGNORE_INDEX).sum()
        loss, _ = loss_of(model(tokens_BS, positions=positions_BS), labels_BS, kept)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.max_grad_norm)
        optimizer.step()
        return loss.detach()

    return step
