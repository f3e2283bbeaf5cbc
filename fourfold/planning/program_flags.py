"""Differences between training programs, which change what a step costs."""

from __future__ import annotations

from dataclasses import dataclass

from fourfold.planning.array_fields import Cases, Number


@dataclass(frozen=True)
class Program(Cases):
    """Differences between training programs; the defaults are fourfold's."""

    is_fourfold: Number = True
    """Pointwise operations are counted one by one; those of others are estimated (``cost.terms.pointwise``)."""
    flash: Number = True
    """Attention is one fused kernel."""
    flash2: Number = False
    """The fused kernel is FlashAttention-2, whatever is faster on the machine."""
    fused: Number = False
    """Pointwise operations are fused (torch.compile, Transformer Engine)."""
    fused_gate: Number = False
    """A gated MLP keeps gate, up and their product, and no activation between."""
    fused_loss: Number = False
    """The loss reads 16-bit logits."""
    keeps_float8_inputs: Number = False
    """FP8 products keep their inputs in FP8 (Transformer Engine)."""
    chunk_logits: Number = 1 << 27
    """Logits computed at once."""
    tiled_mlp: Number = False
    """The MLP runs on as many tokens at a time as the hidden size (DeepSpeed's ALST)."""
    offloads_optimizer: Number = False
    """Gradients, optimizer states and 32-bit weights are kept in the host's memory."""
    blocking: Number = False
    """The host waits for every kernel (CUDA_LAUNCH_BLOCKING)."""

    split_residual: Number = True
    """The residual stream is sharded over x; false for tensor parallelism without sequence parallelism."""
    regather: Number = False
    """Inputs are kept sharded over x and gathered again in the backward, whatever the recompute (Megatron-LM)."""
    overlap_x: Number = True
    """Backward collectives of x and y run behind weight gradients."""
    overlap_forward: Number = False
    """Forward collectives of x run piece by piece behind the product that reads them (AsyncTP)."""
    gate_first: Number = True
    """The sum of gate over y runs behind the product of up."""

    overlap_z: Number = True
    """Weight gathers and gradient scatters run behind computation."""
    overlap_dp: Number = True
    """The gradient sum over dp runs behind the last backward."""
    scatter_bytes: Number = 0
    """Bytes per gradient entry in the sums that scatter over z; 0: as ``Step.reduce_bytes``."""
    prefetch: Number = 1
    """Blocks gathered ahead."""
    shards_per_node: Number = 1
    """Ranks of a shard group in a node, where more than 1: its collectives run inside nodes and across them."""
    weights_kept: Number = False
    """Weights are gathered once per step, not per micro-batch (distributed optimizers)."""
    half_weights: Number = False
    """16-bit weights are stored besides the optimizer's."""
    all_reduces_gradients: Number = False
    """Gradients are all-reduced over dp although each rank needs a shard (DeepSpeed)."""
    fuses_accumulation: Number = False
    """Weight-gradient products add to the gradients of earlier micro-batches (Megatron-LM)."""
    gradient_bytes: Number = 0
    """Bytes per stored gradient entry; 0: as ``Step.reduce_bytes``."""
    gradient_copy: Number = False
    """The optimizer copies its gradients to fp32 (DeepSpeed)."""

    recomputes_attention: Number = False
    """Selective recompute runs the attention core again."""
    recomputes_mlp: Number = True
    """Selective recompute runs the MLP's activation again."""
    recomputes_norms: Number = True
    """Selective recompute runs the norms before attention and MLP again."""
    recomputes_gathers: Number = True
    """Selective recompute repeats the gathers over x and y."""
    recomputes_per_op: Number = False
    """Selective recompute keeps the outputs of the attention and of every second product (torchtitan)."""
    recompute_stops_early: Number = True
    """Full recompute skips a block's last product and its sum over x, which nothing reads."""
    stage_keeps: Number = 0
    """Residuals that a pipeline stage keeps per micro-batch besides those of its blocks."""
    count_runtime: Number = True
    """Memory includes that of the driver and the communication library."""

    experts_over_x: Number = True
    """x divides the experts' widths; false: ep divides them over the ranks of x too, and each is whole
    (Megatron-LM's expert_tensor_parallel_size of 1)."""
    sends_once: Number = False
    """A token goes once to each rank that has any of its experts, and once over the network to each node (DeepEP); not
    once for each expert."""
    fused_experts: Number = False
    """Products of experts make the activation, and round what they read and write to 8 bits."""
    overlap_ep: Number = False
    """Tokens are exchanged over ep behind the computation of another micro-batch."""
    captured: Number = False
    """The host launches a block's kernels together, as CUDA graphs, except those of experts."""
    captured_experts: Number = False
    """It launches those of experts together, too."""


OWN_PROGRAM = Program()

OTHER_PROGRAM = Program(
    is_fourfold=False, gate_first=False, recomputes_attention=True, recomputes_mlp=False, recomputes_norms=False,
    recomputes_gathers=False, recompute_stops_early=False,
)  # fmt: skip
"""The defaults of programs other than fourfold."""
