"""Define flags for differences between training programs that change the time or memory of a step. The letters x, y, z,
dp, and ep are the axes of the grid (docs/parallelism.md)."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.planning.array_fields import ArrayFields, Flag, Number


@dataclass(frozen=True)
class Program(ArrayFields):
    """Differences between training programs. The defaults are fourfold's."""

    is_fourfold: Flag = True
    """Whether the program is fourfold. The planner counts fourfold's pointwise operations one by one. It estimates the
    pointwise operations of other programs (``cost.terms.pointwise``)."""
    flash: Flag = True
    """Whether attention is one fused kernel."""
    flash2: Flag = False
    """Whether the fused kernel is FlashAttention-2, even if the machine has a faster one."""
    fused: Flag = False
    """Whether pointwise operations are fused (torch.compile, Transformer Engine)."""
    fused_gate: Flag = False
    """Whether a gated MLP keeps gate, up, and their product, but no activation in between."""
    fused_loss: Flag = True
    """Whether the loss reads 16-bit logits, as fourfold's loss does on a GPU."""
    eager_loss: Flag = False
    """Whether a loss that is not fused makes 32-bit tensors of the logits, their softmax, and its gradient."""
    keeps_float8_inputs: Flag = False
    """Whether FP8 matmuls keep their inputs in FP8 (Transformer Engine)."""
    chunk_logits: Number = 1 << 27
    """Number of logits that are computed at once."""
    tiled_mlp: Flag = False
    """Whether the MLP runs on chunks with as many tokens as the hidden size (DeepSpeed's ALST)."""
    offloads_optimizer: Flag = False
    """Whether gradients, optimizer states, and 32-bit weights are kept in host memory."""
    blocking: Flag = False
    """Whether the host waits for every kernel (CUDA_LAUNCH_BLOCKING)."""
    host_operations: Number = 0
    """Host time of a block in addition to its launches, for one micro-batch without recompute. Its unit is the time of
    one launch. Two thirds of it are in the backward pass."""

    split_residual: Flag = True
    """Whether the residual stream is sharded over x. False for tensor parallelism without sequence parallelism."""
    regather: Flag = False
    """Whether every recompute mode keeps inputs sharded over x, and gathers them again in the backward pass
    (Megatron-LM)."""
    overlap_x: Flag = True
    """Whether the backward's collectives over x and y overlap with the computation of weight gradients."""
    overlap_forward: Flag = False
    """Whether the forward's collectives over x overlap, piece by piece, with the matmul that reads them (AsyncTP)."""
    gate_first: Flag = True
    """Whether the sum of gate over y overlaps with the matmul of up."""

    overlap_z: Flag = True
    """Whether weight gathers and gradient scatters overlap with computation."""
    overlap_dp: Flag = True
    """Whether the gradient sum over dp overlaps with the last backward pass."""
    scatter_bytes: Number = 0
    """Bytes per gradient entry in reduce-scatters over z. 0 means ``Step.reduce_bytes``."""
    prefetch: Number = 1
    """Number of blocks whose weights are gathered ahead."""
    shards_per_node: Number = 1
    """Number of ranks of a shard group per node. Above 1, collectives run in two levels, inside nodes and across
    nodes."""
    weights_kept: Flag = False
    """Whether weights are gathered once per step instead of once per micro-batch (distributed optimizers)."""
    half_weights: Flag = False
    """Whether 16-bit weights are stored in addition to the optimizer's weights."""
    all_reduces_gradients: Flag = False
    """Whether gradients are all-reduced over dp even though each rank needs only a shard (DeepSpeed)."""
    fuses_accumulation: Flag = False
    """Whether weight-gradient matmuls add to the gradients of earlier micro-batches (Megatron-LM)."""
    gradient_bytes: Number = 0
    """Bytes per stored gradient entry. 0 means ``Step.reduce_bytes``."""
    gradient_copy: Flag = False
    """Whether the optimizer copies its gradients to fp32 (DeepSpeed)."""

    recomputes_attention: Flag = False
    """Whether selective recompute runs the attention core again."""
    recomputes_mlp: Flag = True
    """Whether selective recompute runs the MLP's activation again."""
    recomputes_norms: Flag = True
    """Whether selective recompute runs the norms before attention and MLP again."""
    recomputes_gathers: Flag = True
    """Whether selective recompute repeats the gathers over x and y."""
    recomputes_per_op: Flag = False
    """Whether selective recompute keeps the outputs of the attention and of every second matmul (torchtitan)."""
    recompute_stops_early: Flag = True
    """Whether full recompute skips a block's last matmul and its sum over x, whose results are not needed."""
    stage_keeps: Number = 0
    """Number of additional tensors of the residual stream's size that a pipeline stage keeps per micro-batch."""
    count_runtime: Flag = True
    """Whether memory includes the driver and the communication library."""

    experts_over_x: Flag = True
    """Whether x splits the experts' widths. If not, ep also divides the experts over the x ranks, and each expert is
    whole (Megatron-LM's expert_tensor_parallel_size of 1)."""
    sends_once: Flag = False
    """Whether a token is sent only once to each rank that has any of its experts, and only once over the network to
    each node (DeepEP). Otherwise it is sent once for each of its experts."""
    fused_experts: Flag = False
    """Whether the expert matmuls also compute the activation and round their inputs and outputs to 8 bits."""
    adds_expert_bias: Flag = False
    """Whether separate operations add biases to the experts' outputs (GPT-OSS in Megatron-LM)."""
    overlap_ep: Flag = False
    """Whether the exchange of tokens over ep overlaps with another micro-batch's computation."""
    captured: Flag = False
    """Whether the host launches a block's kernels together as CUDA graphs, except the kernels of the experts."""
    captured_experts: Flag = False
    """Whether the host also launches the kernels of the experts together."""


OWN_PROGRAM = Program()

OTHER_PROGRAM = Program(
    is_fourfold=False, fused_loss=False, gate_first=False, recomputes_attention=True, recomputes_mlp=False,
    recomputes_norms=False, recomputes_gathers=False, recompute_stops_early=False,
)  # fmt: skip
"""The default flags for programs other than fourfold."""
