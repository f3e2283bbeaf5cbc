"""Make rows of measured runs for tests, as CSV."""

from __future__ import annotations

COLUMNS = {
    "row_id": "1", "source": "T", "machine": "dgx-a100", "gpus": "8", "gpus_per_node": "8", "node_gbits": "",
    "model": "m", "architecture": "", "layers": "12", "hidden": "1024", "ffn_hidden": "4096", "mlp": "gelu",
    "heads": "16", "kv_heads": "", "vocab": "51200", "seq_len": "1024", "global_batch": "64", "micro_batch": "2",
    "precision": "bf16", "tp": "1", "pp": "1", "vpp": "1", "cp": "1", "ep": "1", "seq_parallel": "no",
    "end_layers": "", "program": "megatron-lm", "sharding": "none", "shard_group": "", "recompute": "full",
    "recompute_what": "", "recompute_every": "", "attention": "flash", "loss": "", "compiled": "", "tp_overlap": "",
    "blocking": "", "expert_ffn_hidden": "", "gated_experts": "", "sliding_window": "", "sliding_layers": "",
    "tie_word_embeddings": "", "head_dim": "", "q_lora_rank": "", "kv_lora_rank": "", "qk_rope_head_dim": "",
    "v_head_dim": "", "experts": "", "experts_per_token": "", "imbalance": "", "schedule": "", "optimizer": "",
    "master_weights": "", "moments": "", "reduce_dtype": "", "autocast": "", "lora": "", "expandable_segments": "",
    "memory_gb": "", "memory_kind": "", "out_of_memory": "", "notes": "", "complete": "", "doubt": "",
    "step_seconds": "1",
}  # fmt: skip
HEADER = ",".join(COLUMNS)


def row_text(**cells: object) -> str:
    """Return one line of CSV. The defaults of the cells describe a small GPT on a node of A100s."""
    assert set(cells) <= set(COLUMNS), set(cells) - set(COLUMNS)
    return ",".join(str(cells.get(name, default)) for name, default in COLUMNS.items())
