"""Settings of public runs of torchtitan, nanotron, and Hugging Face's Trainer, and the list of all configurations.

megatron_configurations.py says what a configuration is.
"""

from __future__ import annotations

from megatron_configurations import (
    BRIDGE,
    GPT3,
    LLAMA3_8B,
    LLAMA_FP8,
    MIXTRAL_SCRIPT,
    MIXTRAL_YAML,
    Configuration,
)  # fmt: skip

TORCHTITAN = """
[job]
description = "training"
[model]
name = "llama3"
flavor = "{flavor}"
{converters}
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
batch_size = {batch}
seq_len = 8192
compile = {compiled}
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = {tp}
pipeline_parallel_degree = 1
enable_async_tensor_parallel = {compiled}
[activation_checkpoint]
mode = "{mode}"
selective_ac_option = "op"
[float8]
filter_fqns = "output"
"""
# pytorch/torchtitan, torchtitan/models/llama3/train_configs/llama3_8b.toml at 01424cb2.
TITAN_8B = Configuration(
    "titan_8b.toml",
    TORCHTITAN.format(flavor="8B", converters="", batch=1, compiled="false", tp=1, mode="selective"),
    {"gpus": "64"},
    LLAMA3_8B | {"program": "torchtitan", "seq_len": 8192, "global_batch": 64, "micro_batch": 1, "tp": 1,
                 "precision": "bf16", "sharding": "fsdp", "shard_group": 64, "recompute": "selective",
                 "recompute_what": "ops", "recompute_every": 1, "compiled": False, "tp_overlap": None},
    ("float8.filter_fqns = output",),
)  # fmt: skip
# pytorch/torchtitan, torchtitan/models/llama3/train_configs/llama3_405b.toml at 01424cb2.
TITAN_405B = Configuration(
    "titan_405b.toml",
    TORCHTITAN.format(flavor="405B", converters='converters = "float8"', batch=2, compiled="true", tp=8, mode="full"),
    {"gpus": "128"},
    {"program": "torchtitan", "layers": 126, "hidden": 16384, "ffn_hidden": 53248, "heads": 128, "kv_heads": 8,
     "seq_len": 8192, "global_batch": 32, "micro_batch": 2, "tp": 8, "precision": "fp8", "sharding": "fsdp",
     "shard_group": 16, "recompute": "full", "recompute_every": 1, "compiled": True, "tp_overlap": "pieces",
     "seq_parallel": True},
    ("float8.filter_fqns = output",),
)  # fmt: skip

NANOTRON = """
general: {{project: debug, seed: 6}}
model:
  dtype: bfloat16
  ddp_bucket_cap_mb: 25
  make_vocab_size_divisible_by: 1
  model_config: {{{sizes}, hidden_act: silu, rope_scaling: null, tie_word_embeddings: true}}
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: 0
  optimizer_factory: {{name: adamW, adam_beta1: 0.9}}
parallelism: {{{grid}, expert_parallel_size: 1, pp: 1, pp_engine: 1f1b, tp_linear_async_communication: true,
              tp_mode: REDUCE_SCATTER, recompute_layer: false}}
tokens: {{batch_accumulation_per_replica: {accumulation}, {batch}, train_steps: 100}}
lighteval: {{parallelism: {{dp: 4, tp: 2}}}}
"""
NANOTRON_COLUMNS = {"program": "nanotron", "precision": "bf16", "reduce_dtype": "fp32", "sharding": "none", "pp": 1,
                    "recompute": "none", "mlp": "swiglu", "tie_word_embeddings": True, "seq_parallel": True,
                    "tp_overlap": "backward"}  # fmt: skip
# huggingface/smollm, text/pretraining/smollm3/stage1_8T.yaml at a0417598.
SMOLLM3 = Configuration(
    "smollm3.yaml",
    NANOTRON.format(
        sizes="_attn_implementation: flash_attention_2, _use_doc_masking: true, hidden_size: 2048, "
        "intermediate_size: 11008, num_attention_heads: 16, num_hidden_layers: 36, num_key_value_heads: 4, "
        "vocab_size: 128256",
        grid="dp: 192, tp: 2, context_parallel_size: 1",
        accumulation=1,
        batch="micro_batch_size: 3, sequence_length: 4096",
    ),
    {},
    NANOTRON_COLUMNS | {"layers": 36, "hidden": 2048, "ffn_hidden": 11008, "heads": 16, "kv_heads": 4, "vocab": 128256,
                        "gpus": 384, "tp": 2, "cp": 1, "global_batch": 576, "micro_batch": 3, "seq_len": 4096,
                        "attention": "flash2"},
    ("model.ddp_bucket_cap_mb = 25", "model.model_config._use_doc_masking = true"),
)  # fmt: skip
# huggingface/smollm, text/pretraining/smollm1/config_smollm1_135M.yaml at a0417598.
SMOLLM1 = Configuration(
    "smollm1.yaml",
    NANOTRON.format(
        sizes="hidden_size: 576, intermediate_size: 1536, num_attention_heads: 9, num_hidden_layers: 30, "
        "num_key_value_heads: 3, vocab_size: 49152",
        grid="dp: 32, tp: 1",
        accumulation=2,
        batch="micro_batch_size: 8, sequence_length: 2048",
    ),
    {},
    NANOTRON_COLUMNS | {"layers": 30, "hidden": 576, "ffn_hidden": 1536, "heads": 9, "kv_heads": 3, "vocab": 49152,
                        "gpus": 32, "tp": 1, "global_batch": 512, "micro_batch": 8, "seq_len": 2048},
    ("model.ddp_bucket_cap_mb = 25",),
)  # fmt: skip

ZERO3 = """{"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3,
"overlap_comm": true, "sub_group_size": 1e9, "offload_optimizer": {"device": "none"}, "reduce_bucket_size": "auto"}}"""
# hiyouga/LLaMA-Factory, examples/train_full/llama3_full_sft.yaml at 03da9a79, with its ds_z3_config.json.
FACTORY = Configuration(
    "factory.yaml",
    """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
deepspeed: examples/deepspeed/zero3.json
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
bf16: true
""",
    {"gpus": "8"},
    LLAMA3_8B | {"program": "deepspeed", "seq_len": 2048, "global_batch": 16, "micro_batch": 1, "precision": "bf16",
                 "sharding": "zero3", "offload": "none", "recompute": "full", "tp": 1, "pp": 1, "lora": False},
    ("zero_optimization.sub_group_size = 1000000000.0",),
    {"zero3.json": ZERO3},
)  # fmt: skip
# QwenLM/Qwen, finetune/finetune_ds.sh at 2df8e8ac, with its ds_config_zero3.json. The test gives the model.
QWEN = Configuration(
    "qwen.sh",
    """
GPUS_PER_NODE=$(python -c 'import torch; print(torch.cuda.device_count())')
LAUNCH="
    --nproc_per_node $GPUS_PER_NODE \\
    --nnodes ${NNODES:-1}
"
torchrun $LAUNCH finetune.py --model_name_or_path Qwen/Qwen-7B --bf16 True --per_device_train_batch_size 1 \\
    --gradient_accumulation_steps 16 --learning_rate 1e-5 --model_max_length 512 --gradient_checkpointing True \\
    --deepspeed zero3.json
""",
    {"gpus": "8", "layers": "32", "hidden": "4096", "ffn_hidden": "11008", "heads": "32", "mlp": "swiglu",
     "vocab": "151936"},
    {"program": "deepspeed", "seq_len": 512, "global_batch": 128, "micro_batch": 1, "precision": "bf16",
     "sharding": "zero3", "recompute": "full", "gpus": 8, "hidden": 4096},
    ("nproc_per_node = $(python", "zero_optimization.sub_group_size = 1000000000.0"),
    {"zero3.json": ZERO3},
)  # fmt: skip

CONFIGURATIONS = (
    GPT3, BRIDGE, LLAMA_FP8, MIXTRAL_SCRIPT, MIXTRAL_YAML, TITAN_8B, TITAN_405B, SMOLLM3, SMOLLM1, FACTORY, QWEN,
)  # fmt: skip
