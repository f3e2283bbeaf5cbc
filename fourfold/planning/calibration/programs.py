"""Describe training programs by name: which operations each program fuses, which tensors it keeps, which
communication it hides, and a source for these facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

from fourfold.planning.program_flags import OTHER_PROGRAM, OWN_PROGRAM, Program

Overlap = Literal["none", "backward", "pieces"]


CUDNN = replace(OTHER_PROGRAM, regather=True)
"""Flags of programs whose attention is cuDNN's kernel, through Transformer Engine or XLA."""
FLASH2 = replace(CUDNN, flash2=True)


class Traits(NamedTuple):
    """How a program runs a step, unless a row overrides it.

    The defaults describe PyTorch's FSDP without a compiler.
    """

    source: str
    """The program's code or documentation that confirms these values."""
    flags: Program = FLASH2
    """The program's flags, unless a row overrides them. ``regather`` matters only with sequence parallelism, and
    ``keeps_float8_inputs`` only in FP8."""
    half_sums: bool = False
    """Whether gradients are summed over ranks in 16 bits in every precision."""
    hides_sums: bool = False
    """Whether the gradient sum over sharded data-parallel ranks is hidden behind the backward pass."""
    tp_overlap: Overlap = "backward"
    """Which computation hides the tensor-parallel collectives."""
    seq_parallel: bool = False
    """Whether tensor parallelism always includes sequence parallelism."""
    deepspeed: bool = False
    """Whether the program uses DeepSpeed's optimizer and pipeline."""


TRANSFORMER_ENGINE = 300
"""Host time of the Python code in a block of Transformer Engine's modules, as a number of kernel launches that take
equally long: blocks of GPT-2 from 1,536 to 3,072 wide take 4.6 to 5.2 ms on H100s at any tensor-parallel size. NVIDIA's
tuned recipes (NeMo) show no such bound: blocks with 128 experts take 4.9 ms."""
ZERO3_HOOKS = 530
"""Host time of DeepSpeed's hooks around the modules of a block in ZeRO-3, as a number of kernel launches: a block of
Qwen-1.8B takes 11 ms with full recompute, for 256 tokens and for 2,048."""

MEGATRON_LM = Traits(
    "NVIDIA/Megatron-LM: fused kernels (megatron/core/fusions), gradient_accumulation_fusion and the distributed "
    "optimizer's overlapped sums (megatron/core/distributed); attention of Transformer Engine, which prefers cuDNN on "
    "Hopper and Blackwell",
    replace(CUDNN, fused=True, fuses_accumulation=True, host_operations=TRANSFORMER_ENGINE), hides_sums=True,
)  # fmt: skip

PROGRAMS: dict[str, Traits] = {
    "megatron-lm": MEGATRON_LM,
    "nemo": MEGATRON_LM._replace(
        source="NVIDIA/NeMo scripts/performance/helpers.py, and Megatron-Bridge's recipes: grad_reduce_in_fp32 = "
        "False, fused SwiGLU and loss, sequence parallelism; Transformer Engine keeps the inputs of FP8 matmuls in 8 "
        "bits",
        flags=replace(
            MEGATRON_LM.flags, fused_gate=True, fused_loss=True, keeps_float8_inputs=True, host_operations=0
        ),
        half_sums=True, seq_parallel=True,
    ),
    "deepspeed": Traits(
        "deepspeed/runtime/bf16_optimizer.py shards the optimizer of bf16 at any stage and all-reduces fp32 gradients; "
        "runtime/fp16/unfused_optimizer.py copies gradients to fp32; runtime/pipe/engine.py keeps what it has sent",
        tp_overlap="none", deepspeed=True,
    ),
    "megatron-deepspeed": Traits(
        "as deepspeed; its fork of Megatron-LM reduces over tp without overlap (megatron/mpu/layers.py)",
        tp_overlap="none", deepspeed=True,
    ),
    "torchtitan": Traits("pytorch/torchtitan: FSDP2, fused if compiled; AsyncTP is an option"),
    "llm-foundry": Traits(
        "mosaicml/llm-foundry: FSDP, and the fused loss of llmfoundry/models/mpt/modeling_mpt.py",
        replace(FLASH2, fused_loss=True),
    ),
    "fms-fsdp": Traits("foundation-model-stack/fms-fsdp README.md: FSDP and torch.compile"),
    "lit-gpt": Traits("jzhang38/TinyLlama README.md: FSDP on Lightning"),
    "nanotron": Traits(
        "huggingface/nanotron: tensor parallelism in reduce-scatter mode keeps gathered inputs "
        "(src/nanotron/parallel/tensor_parallel); gradients accumulate in fp32 (optim/gradient_accumulator.py)",
        replace(FLASH2, fused=True, fuses_accumulation=True, regather=False),
    ),
    "maxtext": Traits("AI-Hypercomputer/maxtext: sharded by XLA", CUDNN),
    "paxml": Traits("google/paxml: sharded by XLA", CUDNN),
    "axonn": Traits("axonn-ai/axonn: four-dimensional tensor and data parallelism"),
    "fourfold": Traits("this project: the flags are those of its own runs", OWN_PROGRAM),
    "other": Traits("PyTorch's FSDP without a compiler"),
}  # fmt: skip
