"""Rows of measured runs for tests, as CSV."""

from __future__ import annotations

COLUMNS = {
    "row_id": "1", "source_id": "T", "gpu_type": "A100-80GB", "gpus_per_node": "8", "interconnect": "",
    "n_gpus": "8", "model": "m", "layers": "12", "hidden": "1024", "ffn_hidden": "4096", "mlp_type": "gelu",
    "heads": "16", "kv_heads": "", "vocab": "51200", "seq_len": "1024", "global_batch_seqs": "64", "micro_batch": "2",
    "tp": "1", "pp": "1", "vpp": "1", "cp": "1", "dp": "8", "ep": "1", "zero_fsdp": "none", "act_ckpt": "full",
    "seq_parallel": "no", "precision": "bf16", "attention_impl": "FlashAttention", "mem_gb_per_gpu": "",
    "mem_kind": "", "source_ref": "", "notes": "", "grade": "A", "step_time_s": "1", "end": "end",
}  # fmt: skip
HEADER = ",".join(COLUMNS)


def row_text(**cells: object) -> str:
    """One line; cells that are not given are those of a small GPT on a node of A100s."""
    assert set(cells) <= set(COLUMNS), set(cells) - set(COLUMNS)
    return ",".join(str(cells.get(name, default)) for name, default in COLUMNS.items())
