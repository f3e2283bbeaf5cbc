"""Describe training frameworks by flags. A flag is a difference between frameworks that changes the time or memory of a
step. A *program* is a framework, such as fourfold or Megatron-LM. x, y, z, dp, and ep are the axes of the grid
(docs/parallelism.md)."""

from dataclasses import dataclass

from fourfold.planning.array_fields import ArrayFields, Flag, Number


@dataclass(frozen=True)
class Program(ArrayFields):
    """The flags of a training framework. The defaults describe fourfold."""

    is_fourfold: Flag = True
    """Whether the framework is fourfold. The planner counts fourfold's pointwise operations one by one. It estimates
    the pointwise operations of other frameworks (``cost.terms.pointwise``)."""
    flash: Flag = True
    """Whether attention is one fused kernel."""
    flash2: Flag = False
    """Whether the fused attention kernel is FlashAttention-2, even if the machine has a faster one."""
    fused: Flag = False
    """Whether pointwise operations are fused (torch.compile, Transformer Engine)."""
    fused_gate: Flag = False
    """Whether a gated MLP saves gate, up, and silu(gate) · up for the backward pass, but not silu(gate)."""
    fused_loss: Flag = True
    """Whether the loss reads 16-bit logits, as fourfold's loss does on a GPU."""
    eager_loss: Flag = False
    """Whether a loss that is not fused stores three 32-bit tensors: the logits, their softmax, and their gradient."""
    in_place_loss: Flag = False
    """Whether a loss that is not fused overwrites its 32-bit logits with their softmax and gradient (Megatron-LM)."""
    keeps_float8_inputs: Flag = False
    """Whether FP8 matmuls save their inputs for the backward pass in FP8 (Transformer Engine)."""
    chunk_logits: Number = 1 << 27
    """Largest number of logits that one rank computes at once."""
    tiled_mlp: Flag = False
    """Whether the MLP processes one chunk of tokens at a time. A chunk has as many tokens as the hidden size
    (DeepSpeed's ALST)."""
    offloads_optimizer: Flag = False
    """Whether gradients, optimizer states, and 32-bit weights are stored in host memory."""
    blocking: Flag = False
    """Whether the host waits for every kernel (CUDA_LAUNCH_BLOCKING)."""
    host_operations: Number = 0
    """Host time per block and micro-batch in addition to kernel launches, without recompute. The unit is the
    host time of one launch. The backward pass takes two thirds of this time."""

    autocast: Flag = False
    """Whether the residual stream and gathered weights are in fp32, and torch.autocast casts the inputs of matmuls."""
    split_residual: Flag = True
    """Whether the residual stream is sharded over x. False for tensor parallelism without sequence parallelism."""
    regather: Flag = False
    """Whether linear layers save their inputs sharded over x and all-gather them again in the backward pass, in every
    recompute mode (Megatron-LM)."""
    overlap_x: Flag = True
    """Whether the backward pass's collectives over x and y overlap with the computation of weight gradients."""
    overlap_forward: Flag = False
    """Whether the forward pass's collectives over x overlap, piece by piece, with the matmul of the same layer
    (AsyncTP)."""
    gate_first: Flag = True
    """Whether the all-reduce over y of the MLP's gate projection overlaps with the matmul of the up projection."""

    overlap_z: Flag = True
    """Whether weight all-gathers and gradient reduce-scatters overlap with computation."""
    overlap_dp: Flag = True
    """Whether the gradient sum over dp overlaps with the last micro-batch's backward pass."""
    scatter_bytes: Number = 0
    """Bytes per gradient entry in reduce-scatters over z. 0 means ``Step.reduce_bytes``."""
    gathers_per_block: Number = 1
    """Number of all-gathers that collect a block's weights. It is above 1 if a framework gathers the weights of each
    module separately (DeepSpeed)."""
    prefetch: Number = 1
    """Number of blocks whose weights are all-gathered in advance, while an earlier block computes."""
    shards_per_node: Number = 1
    """Number of ranks per node in a shard group (ranks that shard the same weights). If this is above 1, the group's
    collectives run in two levels: inside each node and across nodes."""
    weights_kept: Flag = False
    """Whether weights are all-gathered once per step instead of once per micro-batch (distributed optimizers)."""
    half_weights: Flag = False
    """Whether 16-bit weights are stored in addition to the optimizer's weights."""
    all_reduces_gradients: Flag = False
    """Whether gradients are all-reduced over dp even if each rank needs only a shard (DeepSpeed)."""
    fuses_accumulation: Flag = False
    """Whether weight-gradient matmuls add their results directly to the gradients of earlier micro-batches
    (Megatron-LM)."""
    gradient_bytes: Number = 0
    """Bytes per stored gradient entry. 0 means ``Step.reduce_bytes``."""
    unused_gradients: Flag = False
    """Whether one unused gradient in the step's dtype is stored per shape of a block's weights. Transformer Engine
    returns unused gradients to autograd (``get_dummy_wgrad``), because its kernels have already added the real
    gradients to the sums."""
    gradient_copy: Flag = False
    """Whether the optimizer copies its gradients to fp32 (DeepSpeed)."""

    recomputes_attention: Flag = False
    """Whether selective recompute repeats the attention core."""
    recomputes_mlp: Flag = True
    """Whether selective recompute repeats the MLP's activation."""
    recomputes_norms: Flag = True
    """Whether selective recompute repeats the norms before attention and MLP."""
    recomputes_gathers: Flag = True
    """Whether selective recompute repeats the all-gathers over x and y."""
    recomputes_per_op: Flag = False
    """Whether selective recompute saves only the outputs of attention and of every second matmul (torchtitan)."""
    recompute_stops_early: Flag = True
    """Whether full recompute skips a block's last matmul and the sum of its result over x, because the backward pass
    does not need the block's output."""
    stage_keeps: Number = 0
    """Number of additional tensors, each as large as the residual stream, that a pipeline stage stores per
    micro-batch."""
    expandable_segments: Flag = True
    """Whether PyTorch's allocator uses expandable segments. Without them, the allocator cannot release segments that
    are partly in use."""
    count_runtime: Flag = True
    """Whether predicted memory includes the memory of the driver and of the communication library."""
    count_cached: Flag = True
    """Whether predicted memory includes unused memory that the allocator holds."""

    experts_over_x: Flag = True
    """Whether x splits each expert's width. Otherwise no expert is split, and ep divides the experts over the ranks of
    x too (expert_tensor_parallel_size = 1 in Megatron-LM)."""
    sends_once: Flag = False
    """Whether a token is sent only once to a rank that has several of the token's experts, and only once over the
    network to each node (DeepEP). Otherwise the token is sent once per expert."""
    fused_experts: Flag = False
    """Whether the kernels of the expert matmuls also compute the activation and round inputs and outputs to 8 bits."""
    adds_expert_bias: Flag = False
    """Whether separate operations add biases to the experts' outputs (GPT-OSS in Megatron-LM)."""
    overlap_ep: Flag = False
    """Whether the all-to-all of tokens over ep overlaps with another micro-batch's computation."""
    captured: Flag = False
    """Whether the host launches a block's kernels together as CUDA graphs, except the kernels of the experts."""
    captured_experts: Flag = False
    """Whether the CUDA graphs also include the kernels of the experts."""


OWN_PROGRAM = Program()

OTHER_PROGRAM = Program(
    is_fourfold=False, fused_loss=False, gate_first=False, recomputes_attention=True, recomputes_mlp=False,
    recomputes_norms=False, recomputes_gathers=False, recompute_stops_early=False, expandable_segments=False,
)  # fmt: skip
"""The default flags for frameworks other than fourfold."""
