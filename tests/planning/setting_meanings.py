"""Settings of other programs, each with the columns that they mean and with the settings that are not understood.

The settings follow the programs' documentation and code: NVIDIA/Megatron-LM at d98e8a64, NVIDIA-NeMo/Megatron-Bridge at
a9497c6b, pytorch/torchtitan at 01424cb2, and hiyouga/LLaMA-Factory at 03da9a79. The tests give the model.
"""

from __future__ import annotations

from typing import Any

MEANINGS: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = []
"""Name of a file, its text, and the columns and the settings that are not understood."""

# The marks of torchtitan and of GPT-NeoX, which share names with Megatron-LM.
MEANINGS += [
    ("flavor.toml", "[model]\nflavor = '8B'\n[training]\nglobal_batch_size = 1024",
     {"program": "torchtitan", "seq_len": 2048, "global_batch": 1024, "micro_batch": 8}, ()),
    ("degree.toml", "[parallelism]\ntensor_parallel_degree = 2\n[training]\nglobal_batch_size = 1024",
     {"program": "torchtitan", "tp": 2}, ()),
    ("local.toml", "[training]\nlocal_batch_size = 4\nglobal_batch_size = 1024",
     {"program": "torchtitan", "micro_batch": 4}, ()),
    ("neox.yml", "pipe-parallel-size: 2\nmodel-parallel-size: 4\nnum-layers: 8\nseq-length: 2048\n"
     "train_micro_batch_size_per_gpu: 4\nbf16: {enabled: true}\ncheckpoint-activations: true\n"
     "zero_optimization: {stage: 1}\nactivation: swiglu",
     {"program": "megatron-deepspeed", "pp": 2, "tp": 4, "seq_len": 2048, "global_batch": 32, "precision": "bf16",
      "recompute": "full", "sharding": "zero1"}, ("activation = swiglu",)),
]  # fmt: skip
