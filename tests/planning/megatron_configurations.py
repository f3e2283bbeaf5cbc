"""Settings of public runs of Megatron-LM and Megatron-Bridge, with the columns that they mean.

We wrote these files for the tests. Each file has the settings that change a prediction, and a few settings that do not.
A comment names the public file that the settings come from.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Configuration(NamedTuple):
    """A configuration of another program."""

    name: str
    """Name of the file."""
    text: str
    given: dict[str, str]
    """Columns that the file does not give."""
    columns: dict[str, Any]
    """Columns of the row, checked by hand against the program's documentation."""
    not_understood: tuple[str, ...] = ()
    beside: dict[str, str] = {}  # noqa: RUF012 (nothing changes it)
    """Texts of other files in the same folder, by name."""


LLAMA3_8B = {"layers": 32, "hidden": 4096, "ffn_hidden": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128,
             "vocab": 128256, "mlp": "swiglu", "tie_word_embeddings": False}  # fmt: skip
MIXTRAL = LLAMA3_8B | {"head_dim": None, "experts": 8, "experts_per_token": 2, "expert_ffn_hidden": 14336,
                       "dense_layers": 0, "seq_len": 4096, "global_batch": 256, "micro_batch": 1, "ep": 8,
                       "precision": "bf16", "sharding": "zero1", "pp": 4, "seq_parallel": True}  # fmt: skip

# NVIDIA/Megatron-LM, examples/gpt3/train_gpt3_175b_distributed.sh at d98e8a64. It has 8 GPUs, too few for its layout.
GPT3 = Configuration(
    "gpt3.sh",
    """
NODES=1
LAUNCH=(--nproc_per_node 8 --nnodes $NODES)
SIZES=(
    --num-layers 96 --hidden-size 12288 --num-attention-heads 96
    --seq-length 2048 # GPT-2's context is 1024
    --attention-backend auto
)
BATCH=(--micro-batch-size 1 --global-batch-size 1536 --fp16 --lr 6.0e-5 --min-lr 6.0e-6
       --step-batch-size-schedule "0:16 2.4B:320 4.8B:624")
torchrun ${LAUNCH[@]} pretrain_gpt.py ${SIZES[@]} ${BATCH[@]} \\
    --tensor-model-parallel-size 8 \\
    --pipeline-model-parallel-size 16 --save $1
""",
    {"gpus": "1024"},
    {"program": "megatron-lm", "layers": 96, "hidden": 12288, "heads": 96, "ffn_hidden": None, "mlp": "gelu",
     "vocab": 51200, "tie_word_embeddings": True, "seq_len": 2048, "global_batch": 1536, "micro_batch": 1,
     "precision": "fp16", "tp": 8, "pp": 16, "sharding": "none", "recompute": "none", "seq_parallel": False},
    ("step_batch_size_schedule = 0:16 2.4B:320 4.8B:624",),
)  # fmt: skip

# NVIDIA/Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh at d98e8a64.
LLAMA_FP8 = Configuration(
    "llama_fp8.sh",
    """
DTYPE="fp8"
TP=1
LENGTH=${LENGTH:-8192}
MODEL="--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention \\
    --num-query-groups 8 --kv-channels 128 --seq-length $LENGTH --swiglu --attention-backend fused
    --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout 0.0 --hidden-dropout 0.0"
TRAINING=(--micro-batch-size 1 --global-batch-size 128 --bf16 --grad-reduce-in-bf16 --cross-entropy-loss-fusion)
TRAINING+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
FORMAT=()
if [[ "$DTYPE" == "fp8" ]]; then
    FORMAT+=("--fp8-format hybrid" "--fp8-param-gather")
fi
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py $MODEL ${TRAINING[@]} ${FORMAT[@]} --vocab-size 128256 \\
    --tensor-model-parallel-size $TP --sequence-parallel
""",
    {},
    LLAMA3_8B | {"program": "megatron-lm", "seq_len": 8192, "global_batch": 128, "micro_batch": 1, "gpus": 8,
                 "precision": "fp8", "sharding": "zero1", "tp": 1, "pp": 1, "reduce_dtype": "bf16",
                 "attention": "cudnn", "loss": "fused", "recompute": "none", "seq_parallel": True},
    ("disable_bias_linear = true", "fp8_param_gather = true"),
)  # fmt: skip

# NVIDIA/Megatron-LM, examples/mixtral/train_mixtral_8x7b_distributed.sh at d98e8a64.
MIXTRAL_SCRIPT = Configuration(
    "mixtral.sh",
    """
GPUS_PER_NODE=8
NODES=${SLURM_NNODES:-"1"}
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NODES pretrain_gpt.py --num-layers 32 --hidden-size 4096 \\
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu \\
    --normalization RMSNorm \\
    --untie-embeddings-and-output-weights --seq-length 4096 --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm \\
    --moe-token-dispatcher-type alltoall --micro-batch-size 1 --global-batch-size 256 --bf16 \\
    --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 --use-distributed-optimizer --sequence-parallel
""",
    {"gpus": "64"},
    MIXTRAL | {"program": "megatron-lm", "tp": 1, "vocab": 50304, "experts_over_tp": True, "vpp": 1},
)

# NVIDIA/Megatron-LM, tests/functional_tests/test_cases/mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release at d98e8a64.
MIXTRAL_YAML = Configuration(
    "mixtral.yaml",
    """
ENV_VARS: {NCCL_NVLS_ENABLE: 0, PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}
MODEL_ARGS:
  --tensor-model-parallel-size: 2
  --pipeline-model-parallel-size: 4
  --expert-model-parallel-size: 8
  --expert-tensor-parallel-size: 1
  --num-layers-per-virtual-pipeline-stage: 1
  --use-distributed-optimizer: true
  --sequence-parallel: true
  --use-flash-attn: true
  --micro-batch-size: 1
  --global-batch-size: 256
  --untie-embeddings-and-output-weights: true
  --swiglu: true
  --num-layers: 32
  --hidden-size: 4096
  --ffn-hidden-size: 14336
  --num-attention-heads: 32
  --num-query-groups: 8
  --seq-length: 4096
  --make-vocab-size-divisible-by: 128
  --num-experts: 8
  --moe-router-topk: 2
  --bf16: true
  --split: 99,1,0
  --save: ${SAVE_PATH}
""",
    {"gpus": "64"},
    MIXTRAL
    | {
        "program": "megatron-lm",
        "tp": 2,
        "vocab": 50432,
        "experts_over_tp": False,
        "vpp": 8,
        "expandable_segments": True,
    },
    ("ENV_VARS.NCCL_NVLS_ENABLE = 0",),
)

# NVIDIA-NeMo/Megatron-Bridge, scripts/performance/dryrun_configs/deepseek/deepseek_v3_pretrain_h100_fp8_sc_v1.yaml at
# a9497c6b.
BRIDGE = Configuration(
    "bridge.yaml",
    """
_target_: megatron.bridge.training.config.ConfigContainer
ddp: {use_distributed_optimizer: true, overlap_grad_reduce: false, overlap_param_gather: true}
logger: {_target_: megatron.bridge.training.config.LoggerConfig, log_interval: 1}
mixed_precision: {bf16: true, fp8: hybrid, fp8_recipe: blockwise, grad_reduce_in_fp32: false}
model: {activation_func: {_call_: false, _target_: torch.nn.functional.silu}, bf16: true, context_parallel_size: 1,
        expert_model_parallel_size: 64, expert_tensor_parallel_size: 1, ffn_hidden_size: 18432, fp8: null,
        gated_linear_unit: true, hidden_size: 7168, kv_channels: 64, kv_lora_rank: 512, mtp_num_layers: 1,
        make_vocab_size_divisible_by: 1280, moe_ffn_hidden_size: 2048, moe_layer_freq: [0, 0, 0, 1, 1, 1, 1],
        moe_router_topk: 8, moe_shared_expert_intermediate_size: 2048, moe_token_dispatcher_type: flex,
        num_attention_heads: 128, num_layers: 61, num_moe_experts: 256, num_query_groups: 128,
        pipeline_model_parallel_size: 8, q_lora_rank: 1536, qk_head_dim: 128, qk_pos_emb_head_dim: 64,
        recompute_granularity: selective, recompute_modules: [mla_up_proj, mlp], seq_length: 4096,
        sequence_parallel: true, should_pad_vocab: false, share_embeddings_and_output_weights: false,
        tensor_model_parallel_size: 2, v_head_dim: 128, virtual_pipeline_model_parallel_size: 4, vocab_size: 129280}
optimizer: {exp_avg_dtype: {_target_: torch.bfloat16}, main_params_dtype: {_target_: torch.float32}, lr: 0.0003}
tokenizer: {vocab_size: 32000}
train: {global_batch_size: 8192, micro_batch_size: 1, train_iters: 50}
""",
    {"gpus": "1024"},
    {"program": "nemo", "layers": 61, "hidden": 7168, "ffn_hidden": 18432, "heads": 128, "head_dim": 192,
     "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab": 129280,
     "experts": 256, "experts_per_token": 8, "expert_ffn_hidden": 2048, "shared_ffn_hidden": 2048, "dense_layers": 3,
     "experts_over_tp": False, "dispatcher": "deepep", "seq_len": 4096, "global_batch": 8192, "micro_batch": 1,
     "tp": 2, "pp": 8, "vpp": 4, "ep": 64, "precision": "fp8", "reduce_dtype": "bf16", "moments": "bf16",
     "sharding": "zero1", "recompute": "selective", "recompute_what": "attention", "tie_word_embeddings": False},
    ("ddp.overlap_grad_reduce = false", "model.mtp_num_layers = 1", "model.recompute_modules = mla_up_proj mlp"),
)  # fmt: skip
