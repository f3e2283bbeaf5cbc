"""Make models to parallelize, from transformers and our own, and compute their results on one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_dense_models import SIZES
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"num_key_value_heads": 4, "vocab_size": 208, "pad_token_id": 3}),
    "qwen3": (
        "Qwen3Config",
        {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 208, "tie_word_embeddings": True},
    ),
    "mistral": ("MistralConfig", {"num_key_value_heads": 4, "sliding_window": 8, "vocab_size": 208}),
    "gpt_neox": ("GPTNeoXConfig", {"vocab_size": 208, "attention_bias": True, "intermediate_size": 96}),
    "gpt2": (
        "GPT2Config",
        {"vocab_size": 208, "n_inner": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "openai_gpt": (
        "OpenAIGPTConfig",
        {"vocab_size": 208, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3Config", {"num_key_value_heads": 4, "vocab_size": 208}),
    "gemma": ("GemmaConfig", {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 208}),
    "olmo2": ("Olmo2Config", {"num_key_value_heads": 4, "vocab_size": 208}),
    "mixtral": ("MixtralConfig", {"num_key_value_heads": 4, "num_local_experts": 8, "vocab_size": 208}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 208, "num_experts": 8, "num_experts_per_tok": 3}
        | {"moe_intermediate_size": 24, "mlp_only_layers": [0]},
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 4, "num_experts_per_tok": 1, "vocab_size": 208}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 208}
        | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 48},
    ),
    "gemma2": ("Gemma2Config", {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 208}),
    "gemma3": ("Gemma3TextConfig", {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 208}),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 208}),
    "mellum": (
        "MellumConfig",
        {"num_key_value_heads": 4, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 208}
        | {"moe_intermediate_size": 24},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "vocab_size": 208}
        | {"moe_intermediate_size": 24},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"num_key_value_heads": 4, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "vocab_size": 208},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        | {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        | {"moe_intermediate_size": 24, "vocab_size": 208},
    ),
    "apertus": ("ApertusConfig", {"num_key_value_heads": 4, "vocab_size": 208}),
    "minimax": (
        "MiniMaxConfig",
        {"num_key_value_heads": 4, "num_local_experts": 4, "head_dim": 8, "vocab_size": 208, "block_size": 8},
    ),
    "laguna": (
        "LagunaConfig",
        {"num_key_value_heads": 4, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 208}
        | {"moe_intermediate_size": 24},
    ),
    "ministral": ("MinistralConfig", {"num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8, "vocab_size": 208}),
    "seed_oss": (
        "SeedOssConfig",
        {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 208, "attention_dropout": 0, "residual_dropout": 0},
    ),
    "starcoder2": ("Starcoder2Config", {"num_key_value_heads": 4, "vocab_size": 208}),
    "vaultgemma": ("VaultGemmaConfig", {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 208}),
    "glm": ("GlmConfig", {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 208}),
    "glm4": ("Glm4Config", {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 208}),
    "ernie4_5": ("Ernie4_5Config", {"num_key_value_heads": 4, "head_dim": 16, "vocab_size": 208}),
    "helium": ("HeliumConfig", {"num_key_value_heads": 4, "head_dim": 8, "vocab_size": 208}),
}


def make(name: str, **changes: Any) -> nn.Module:
    """Make a random model that is the same in every process. Every parameter affects the result."""
    kind, keys = FAMILIES[name]
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(SIZES | keys | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape)
    return model.train()


def make_batch() -> tuple[Tensor, Tensor]:
    """Return tokens [8, 16], with some padding tokens, and labels with a different number of masked tokens per row."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(4, 200, (8, 16), generator=generator)
    tokens[:, 3] = 3
    labels = tokens.clone()
    for row in range(8):
        labels[row, : row + 2] = -100
    return tokens, labels


def reference(name: str) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    """Return the loss, gradient norm, gradients, and weights after a step of the original model on one process."""
    model, (tokens, labels) = make(name), make_batch()
    loss = model(input_ids=tokens, labels=labels).loss
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return loss.item(), norm.item(), gradients, {n: p.detach() for n, p in model.named_parameters()}


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    assert got.keys() == want.keys()
    return max(((got[n] - want[n]).norm() / want[n].norm()).item() for n in want)


class Own(nn.Module):
    """A model that is not from a library."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), nn.ModuleDict({"up": nn.Linear(32, 48), "down": nn.Linear(48, 32)})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp["down"](torch.nn.functional.gelu(self.mlp["up"](self.norm(x))))


OWN_RULES = {"table": "embedding", "*.up": "colwise", "*.down": "rowwise", "head": "colwise_gather_output"}
