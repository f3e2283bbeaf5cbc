"""Settings of other programs. For each file of settings, list the columns that it means, and the settings that are not
understood.

The settings follow the programs' documentation and code: NVIDIA/Megatron-LM at d98e8a64, NVIDIA-NeMo/Megatron-Bridge at
a9497c6b, pytorch/torchtitan at 01424cb2, and hiyouga/LLaMA-Factory at 03da9a79. The tests give the model.
"""

from __future__ import annotations

from typing import Any

MEANINGS: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = []
"""For each file: its name, its text, the columns that it means, and the settings that are not understood."""

# Settings that identify torchtitan and GPT-NeoX. Many of their settings have the same names as in Megatron-LM.
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

MEGATRON = "pretrain_gpt.py --num-layers 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64 --bf16 "
LATENT = "--multi-latent-attention --kv-lora-rank 512 "
FSDP = MEGATRON + "--use-distributed-optimizer --use-megatron-fsdp "
SELECTIVE = MEGATRON + "--recompute-granularity selective --recompute-modules "
BRIDGE = (
    "train: {train_iters: 5}\nmodel: {num_layers: 32, seq_length: 4096}\nmicro_batch_size: 1\nglobal_batch_size: 64\n"
)
MEANINGS += [
    ("experts.sh", MEGATRON + "--swiglu --num-experts 8",
     {"experts": 8, "experts_per_token": 2, "experts_over_tp": True}, ()),
    ("dense.sh", MEGATRON, {"experts": None, "experts_per_token": None, "cp_method": "ring"}, ()),
    ("ulysses.sh", MEGATRON + "--cp-comm-type a2a", {"cp_method": "ulysses"}, ()),
    ("norms.sh", SELECTIVE + "layernorm moe_act", {"recompute": "selective", "recompute_what": "activations"}, ()),
    ("core.sh", SELECTIVE + "core_attn", {"recompute_what": "attention"}, ()),
    ("moe.sh", SELECTIVE + "moe", {"recompute_what": "attention"}, ("recompute_modules = moe",)),
    ("old.sh", MEGATRON + "--checkpoint-activations --checkpoint-num-layers 1", {"recompute": "full"}, ()),
    ("fsdp.sh", FSDP, {"sharding": "fsdp"}, ()),
    ("unsharded.sh", FSDP + "--data-parallel-sharding-strategy no_shard", {"sharding": "zero1"}, ()),
    ("optim.sh", FSDP + "--data-parallel-sharding-strategy optim", {"sharding": "zero1"}, ()),
    ("grads.sh", FSDP + "--data-parallel-sharding-strategy optim_grads", {"sharding": "zero2"}, ()),
    ("custom.sh", MEGATRON + "--use-distributed-optimizer --use-custom-fsdp", {"sharding": "zero1"}, ()),
    ("ddp.yaml", BRIDGE + "ddp: {use_distributed_optimizer: false, data_parallel_sharding_strategy: no_shard}",
     {"program": "nemo", "sharding": "none"}, ()),
    ("latent.sh", MEGATRON + LATENT, {"head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 128}, ()),
    ("narrow.sh", MEGATRON + LATENT + "--qk-head-dim 64 --v-head-dim 96",
     {"head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 96}, ()),
    ("swiglu.yaml", BRIDGE + "language_model: {activation_func: swiglu}", {"mlp": "swiglu", "ffn_hidden": 10880}, ()),
    ("relu.yaml", BRIDGE + "language_model: {activation_func: squared_relu}", {"mlp": "sqrelu"}, ()),
    ("silu.yaml", BRIDGE + "language_model: {activation_func: silu, gated_linear_unit: true}",
     {"mlp": "swiglu", "ffn_hidden": None}, ()),
    ("bf16.yaml", BRIDGE + "mixed_precision: bf16_mixed", {"precision": "bf16", "reduce_dtype": "fp32"}, ()),
    ("fp8.yaml", BRIDGE + "mixed_precision: bf16_with_fp8_current_scaling_mixed", {"precision": "fp8"}, ()),
    ("mxfp8.yaml", BRIDGE + "mixed_precision: bf16_with_mxfp8_mixed", {"precision": "mxfp8"}, ()),
    ("fp16.yaml", BRIDGE + "mixed_precision: fp16_mixed", {"precision": "fp16", "reduce_dtype": None}, ()),
    ("checkpoint.sh", MEGATRON + "--use-checkpoint-args", {"layers": 32}, ("use_checkpoint_args = true",)),
]  # fmt: skip

# Tokenizers determine the size of the vocabulary, unless a setting gives the size.
MEANINGS += [
    ("gpt2.sh", MEGATRON + "--tokenizer-type GPT2BPETokenizer --vocab-file a --merge-file b", {"vocab": 50304}, ()),
    ("llama2.sh", MEGATRON + "--tokenizer-type Llama2Tokenizer", {"vocab": 32000}, ()),
    ("sized.sh", MEGATRON + "--vocab-size 128256 --tokenizer-type Llama2Tokenizer", {"vocab": 128256}, ()),
    ("padded.sh", MEGATRON + "--padded-vocab-size 40000 --tokenizer-type Llama2Tokenizer", {"vocab": 40000}, ()),
    ("null.sh", MEGATRON + "--tokenizer-type NullTokenizer --vocab-size 131072", {"vocab": 131072}, ()),
    ("hub.sh", MEGATRON + "--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B",
     {"vocab": 50304}, ("tokenizer_type = HuggingFaceTokenizer", "tokenizer_model = meta-llama/Meta-Llama-3-8B")),
]  # fmt: skip

TITAN = "[training]\nlocal_batch_size = 8\n[model]\nname = 'qwen3'\nflavor = '30B-A3B'\n"
DEGREES = TITAN + "[parallelism]\ntensor_parallel_degree = 2\n"
INTERLEAVED = TITAN + "[parallelism]\npipeline_parallel_schedule = 'Interleaved1F1B'\npipeline_parallel_degree = "
OLD_TITAN = """[training]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 4
[experimental]
pipeline_parallel_degree = 2
context_parallel_degree = 1
"""
MEANINGS += [
    ("ep.toml", DEGREES + "expert_parallel_degree = 4", {"ep": 4, "experts_over_tp": False}, ()),
    ("over.toml", DEGREES + "expert_parallel_degree = 4\nexpert_tensor_parallel_degree = 2",
     {"ep": 4, "experts_over_tp": True}, ()),
    ("one.toml", DEGREES + "expert_tensor_parallel_degree = 1", {"ep": 1, "experts_over_tp": True}, ()),
    ("old.toml", OLD_TITAN, {"tp": 4, "pp": 2, "cp": 1, "shard_group": 4, "global_batch": 64, "micro_batch": 1}, ()),
    ("stages.toml", INTERLEAVED + "2", {"pp": 2, "vpp": 2}, ()),
    ("stage.toml", INTERLEAVED + "1", {"pp": 1, "vpp": 1}, ()),
    ("float8.toml", TITAN + "converters = ['quantize.linear.float8']", {"precision": "fp8"}, ()),
    ("other.toml", TITAN + "converters = ['quantize.grouped_mm.mx']", {"precision": "bf16"},
     ("model.converters = quantize.grouped_mm.mx",)),
    ("job.sh", "--job.config_file a.toml --training.local_batch_size 4 --job.dump_folder out", {"micro_batch": 4},
     ("job.config_file = a.toml",)),
]  # fmt: skip

FACE = "per_device_train_batch_size: 1\ncutoff_len: 2048\nbf16: true\n"
SHARDED = FACE + "fsdp: full_shard auto_wrap\n"
MEANINGS += [
    ("default.yaml", FACE + "stage: sft", {"lora": True, "recompute": "full"}, ()),
    ("full.yaml", FACE + "stage: pt\nfinetuning_type: full\nlora_rank: 8", {"lora": False, "recompute": "full"},
     ("lora_rank = 8",)),
    ("freeze.yaml", FACE + "stage: sft\nfinetuning_type: freeze", {"recompute": "full"}, ("finetuning_type = freeze",)),
    ("peft.yaml", FACE + "use_peft: false\nlora_r: 16", {"lora": False}, ("lora_r = 16",)),
    ("ddp.yaml", FACE, {"sharding": "none", "precision": "bf16", "autocast": True}, ()),
    ("fsdp.yaml", SHARDED, {"sharding": "fsdp", "autocast": False, "recompute": "none"}, ()),
    ("recompute.yaml", SHARDED + "fsdp_config: {activation_checkpointing: true}", {"recompute": "full"}, ()),
    ("grad.yaml", FACE + "fsdp: shard_grad_op auto_wrap", {"sharding": "zero2", "autocast": False}, ()),
    ("zero.yaml", FACE + "zero_optimization: {stage: 2}",
     {"program": "deepspeed", "sharding": "zero2", "autocast": False}, ()),
    ("half.yaml", FACE + "pure_bf16: true", {"master_weights": "bf16", "moments": "bf16", "autocast": False}, ()),
    ("mixed.yaml", "per_device_train_batch_size: 1\nmax_length: 512\nmixed_precision: bf16",
     {"precision": "bf16", "seq_len": 512}, ()),
    ("paged.yaml", FACE + "optim: paged_adamw_8bit", {"moments": "int8"}, ()),
    ("accelerate.sh", "accelerate launch --config_file fsdp.yaml train.py --max_length 512 "
     "--per_device_train_batch_size 2", {"micro_batch": 2}, ("config_file = fsdp.yaml",)),
]  # fmt: skip

# The settings of the first file do not change a prediction. All other files have settings that look as harmless but are
# not, so they must be listed as not understood.
MEANINGS += [
    ("harmless.sh", MEGATRON + "--lr 1e-4 --seed 1 --log-interval 10 --save out --data-path data --rotary-base 10000",
     {"layers": 32}, ()),
    ("harmful.sh", MEGATRON + "--rampup-batch-size 16 16 1000 --qk-rope-head-dim 64 --no-rope-fusion",
     {"qk_rope_head_dim": None},
     ("rampup_batch_size = 16 16 1000", "qk_rope_head_dim = 64", "no_rope_fusion = true")),
    ("mini.yaml", FACE + "learning_rate: 1e-5\nuse_adam_mini: true", {"optimizer": "adamw"}, ("use_adam_mini = true",)),
    ("peft.yml", BRIDGE + "peft: {_target_: megatron.bridge.peft.lora.LoRA}\ncheckpoint: {use_checkpoint_args: true}",
     {"lora": False}, ("peft._target_ = megatron.bridge.peft.lora.LoRA", "checkpoint.use_checkpoint_args = true")),
    ("neox16.yml", "pipe_parallel_size: 1\nseq_length: 64\ntrain_micro_batch_size_per_gpu: 4\n"
     "fp16: {type: bfloat16, loss_scale: 0}", {"precision": "fp32"}, ("fp16.type = bfloat16",)),
]  # fmt: skip
