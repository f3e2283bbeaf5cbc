"""Define the columns of a table of measured training runs. Each line of the CSV file is one configuration with its
measured step time or memory. The *exchange* of a mixture-of-experts model sends tokens to their experts and back."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fourfold.config.expected_values import mistake
from fourfold.config.model_keys import MOST_LAYERS
from fourfold.planning.calibration.programs import PROGRAMS

LARGEST = 1e12
"""Every number in a row must be below this bound."""


def _whole(number: float) -> float:
    if number != int(number):
        raise ValueError("give a whole number")
    return number


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("give yes or no")
    return text == "yes"


def _program(name: str) -> str:
    if name not in PROGRAMS:
        raise ValueError(f"choose from {', '.join(PROGRAMS)}, or other")
    return name


Size = Annotated[float, Field(gt=0, lt=LARGEST)]
Count = Annotated[float, Field(ge=1, lt=LARGEST), AfterValidator(_whole)]
Flag = Annotated[bool, BeforeValidator(_yes_or_no)]


class MeasuredRow(BaseModel):
    """One measured training run. A value is None if the source does not give it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    row_id: str = ""
    """Name of the row, unique within its source."""
    source: str = "unnamed"
    """Name of the publication, or a name for your own measurements."""
    where: str = ""
    """Where the source states the measurement: file and line, or table."""
    system: str = ""
    """Name of the cluster."""
    notes: str = ""
    """Free text. fourfold does not read it."""
    derived: str = ""
    """Names of the columns whose values you computed from other values in the source."""
    complete: Flag = True
    """`no` if the source does not state the full configuration. The errors of such rows are reported separately."""
    doubt: str = ""
    """Why the measurement is doubtful. The errors of such rows are reported separately, and nothing is fitted to
    them."""

    machine: str | None = None
    """A machine that comes with fourfold, or your own `.toml`."""
    gpus: Count
    """Number of GPUs of the run."""
    gpus_per_node: Count | None = None
    """Number of GPUs per node. Default: the machine file's value."""
    node_gbits: Size | None = None
    """Total bandwidth of a node's network adapters, in Gb/s. Default: the machine file's value."""

    model: str = ""
    """The model's name. Give runs of the same model the same name."""
    architecture: Literal["dense", "moe", "hybrid"] = "dense"
    """Kind of model. `moe` is a mixture of experts. `hybrid` is a model with blocks other than attention and MLP, or
    with latent attention of unknown widths. The planner does not predict `hybrid`."""
    layers: Count | None = Field(None, le=MOST_LAYERS)
    """Number of blocks."""
    hidden: Count | None = None
    """Width of the residual stream."""
    ffn_hidden: Count | None = None
    """Width of the MLP. Default: 4 · hidden."""
    mlp: Literal["gelu", "sqrelu", "geglu", "swiglu"] = "gelu"
    """Type of the MLP. The planner assumes rotary embeddings for `swiglu`, and none for the other types."""
    tie_word_embeddings: Flag | None = None
    """Whether embedding and head share one weight. Default: yes for `gelu` and `geglu`, otherwise no."""
    heads: Count | None = None
    """Number of query heads."""
    kv_heads: Count | None = None
    """Number of key and value heads. Default: heads."""
    head_dim: Count | None = None
    """Number of channels of a head. With latent attention: number of channels of a query or key head, including the
    rotary channels. Default: hidden / heads."""
    q_lora_rank: Count | None = None
    """Latent attention: width of the query latent."""
    kv_lora_rank: Count | None = None
    """Latent attention: width of the latent of keys and values."""
    qk_rope_head_dim: Count | None = None
    """Latent attention: number of rotary channels of a head."""
    v_head_dim: Count | None = None
    """Latent attention: number of channels of a value head."""
    sliding_window: Count | None = None
    """Number of tokens that a query sees in blocks with a sliding window."""
    sliding_layers: Count | None = None
    """Number of blocks with a sliding window. Default: all blocks, if `sliding_window` is given."""
    experts: Count | None = None
    """Number of experts per block. Needed for MoE models."""
    experts_per_token: Count | None = None
    """Number of experts per token."""
    expert_ffn_hidden: Count | None = None
    """Inner width of one expert."""
    gated_experts: Flag = True
    """Whether the experts are gated MLPs, with three matrices instead of two."""
    shared_ffn_hidden: float = Field(0.0, ge=0, lt=LARGEST)
    """Inner width of the shared expert, a gated MLP."""
    dense_layers: float = Field(0.0, ge=0, lt=LARGEST)
    """MoE models: number of blocks that have a dense MLP (of width `ffn_hidden`) instead of experts."""
    capacity_factor: Size | None = None
    """Largest number of tokens that an expert processes, as a multiple of the mean over the experts. Default: no
    limit."""
    imbalance: float = Field(1.0, ge=1, lt=LARGEST)
    """Number of tokens on the ep rank with the most tokens, divided by the mean over the ep ranks. Default: 1 (all
    ranks get equally many tokens)."""
    vocab: Count | None = None
    """Size of the vocabulary, including padding. Default: 51,200 (GPT-2's vocabulary, padded)."""

    seq_len: Count | None = None
    """Number of tokens per sequence."""
    global_batch: Count | None = None
    """Number of sequences per step."""
    micro_batch: Count | None = None
    """Number of sequences per micro-batch on one rank."""
    precision: Literal["fp32", "fp16", "bf16", "fp8", "mxfp8", "nvfp4"]
    """Precision of the matmuls. The planner does not predict nvfp4."""

    tp: Count | None = None
    """Tensor parallel size."""
    pp: Count | None = None
    """Pipeline parallel size."""
    vpp: Count = 1.0
    """Number of pipeline stages per rank (interleaved 1F1B)."""
    cp: Count = 1.0
    """Context parallel size."""
    ep: Count = 1.0
    """Expert parallel size."""
    experts_over_tp: Flag = True
    """Whether each expert is split over the tp ranks. With `no` (an expert tensor parallel size of 1), each tp rank has
    different, whole experts."""
    dispatcher: Literal["alltoall", "deepep"] = "alltoall"
    """How the exchange sends a token to a GPU with several of the token's experts: `alltoall` sends it once per expert,
    and `deepep` (DeepEP and HybridEP) sends it once."""
    fused_experts: Flag = False
    """Whether the experts run as fused kernels. With `yes`, a matmul kernel also computes the activation and rounds the
    result to 8 bits, and the exchange delivers the tokens sorted by expert."""
    ep_overlap: Flag = False
    """Whether the exchange runs at the same time as the matmuls of another micro-batch."""
    cuda_graph: Literal["none", "blocks", "step"] = "none"
    """Which kernels the host launches together as a CUDA graph: the kernels of a block except the experts' kernels
    (`blocks`), or all kernels of a step (`step`)."""
    seq_parallel: Flag | None = None
    """Whether the residual stream is sharded over tp (sequence parallelism). Default: the framework's usual choice."""
    end_layers: Flag = False
    """Whether the embedding and the head each count as one layer when layers are divided into pipeline stages."""

    schedule: Literal["1F1B", "GPipe", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"] = "1F1B"
    """The pipeline schedule."""

    program: Annotated[str, AfterValidator(_program)]
    """The training framework. `fourfold/planning/calibration/programs.toml` lists the names."""
    sharding: Literal["none", "zero1", "zero2", "zero3", "fsdp", "hsdp"] = "none"
    """What the data-parallel ranks shard. With `hsdp`, each shard group holds one copy of the model."""
    shard_group: Count | None = None
    """Number of GPUs in a shard group. Default: all data-parallel ranks for `fsdp`, and the GPUs of a node for
    `hsdp`."""
    recompute: Literal["none", "selective", "full"] | None = None
    """Which activations of a block the backward pass recomputes: none (`none`), some (`selective`), or all (`full`)."""
    recompute_what: Literal["attention", "ops", "layers", "activations"] = "attention"
    """What selective recompute repeats. `attention` repeats the attention core. `layers` repeats everything in some
    blocks, and nothing in all other blocks. The planner predicts `layers` like `attention`. `activations` repeats the
    norms and the activation functions of MLPs and experts. `ops` (torchtitan's per-op mode) repeats half of the matmuls
    and all other operations except the attention core."""
    recompute_every: Count = 1.0
    """If this is n, only every n-th block is recomputed."""
    attention: Literal["flash", "flash2", "flash3", "cudnn", "unfused"] = "flash"
    """The attention kernel. `flash`: the framework's usual fused kernel. `flash2`, `flash3`: FlashAttention-2 or -3.
    `cudnn`: cuDNN's fused kernel. `unfused`: separate kernels that write the scores to memory."""
    compiled: Flag = False
    """Whether torch.compile fuses pointwise operations."""
    tp_overlap: Literal["none", "backward", "pieces"] | None = None
    """Which computation hides tensor-parallel collectives. `backward`: the matmuls of the weight gradients. `pieces`:
    also the layer's own matmul, which then runs in pieces (AsyncTP, tp_comm_overlap). Default: the framework's usual
    choice."""
    blocking: Flag = False
    """Whether the host waits for every kernel (CUDA_LAUNCH_BLOCKING=1)."""

    step_seconds: Size | None = None
    """Seconds of an optimizer step."""
    time_from: Literal["printed", "tokens", "flops"] = "printed"
    """Where the step time comes from: the source states it (`printed`), or you computed it from tokens/s (`tokens`) or
    FLOP/s (`flops`)."""
    memory_gb: Size | None = None
    """Peak memory of the GPU that uses the most memory, in GB (10⁹ bytes)."""
    memory_kind: Literal["device", "allocator", "tensors"] = "allocator"
    """What `memory_gb` measures. `device`: all memory in use on the device, as in nvidia-smi. `allocator`: the memory
    that PyTorch's allocator has reserved. `tensors`: the memory of tensors, as in
    torch.cuda.max_memory_allocated."""
    expandable_segments: Flag = False
    """Whether PyTorch's allocator uses expandable segments. Runs of fourfold always use them, so their
    rows need no value."""
    out_of_memory: Flag = False
    """`yes` if the run ran out of memory."""
    cp_method: Literal["gathered", "ring", "ulysses"] = "gathered"
    """How the cp ranks share attention: they gather keys and values (`gathered`), pass them around a ring (`ring`), or
    divide the heads among themselves (`ulysses`)."""
    tiled: Literal["none", "loss", "both"] = "none"
    """Which part of the model processes the tokens in chunks, to save memory: the loss (`loss`), or the loss and the
    MLP (`both`). A chunk has as many tokens as the hidden size."""
    offload: Literal["none", "inputs", "optimizer", "both"] = "none"
    """What is stored in host memory. `inputs`: the inputs of recomputed blocks. `optimizer`: the gradients, optimizer
    states, and 32-bit weights. `both`: all of these."""
    loss: Literal["fused", "compiled", "eager"] | None = None
    """Which 32-bit tensors the loss stores if the logits have 16 bits: none (`fused`), a copy of the logits
    (`compiled`), or the copy, its softmax, and the gradient of the copy (`eager`). Default: the framework's usual
    choice."""

    expert_bias: Flag = False
    """Whether the experts have biases (GPT-OSS)."""
    optimizer: Literal["adamw", "muon", "lion"] = "adamw"
    """The optimizer."""
    master_weights: Literal["fp32", "bf16"] = "fp32"
    """Data type of the weights that the optimizer updates."""
    moments: Literal["fp32", "bf16", "int8"] = "fp32"
    """Data type of the optimizer's moments."""
    reduce_dtype: Literal["fp32", "bf16"] | None = None
    """Data type in which gradients are summed over micro-batches and ranks. Default: the framework's usual choice."""
    autocast: Flag = False
    """Whether the model's weights and residual stream are fp32, and torch.autocast casts the inputs of matmuls."""
    lora: Flag = False
    """Whether only low-rank adapters are trained. The planner does not predict such runs."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        """Raise ``ValueError`` for a combination of values that no run can have."""
        for name, whole, unit, part in (
            ("hidden", None if self.head_dim else self.hidden, "heads", self.heads),
            ("heads", self.heads, "kv_heads", self.kv_heads),
            ("gpus", self.gpus, "shard_group", self.shard_group),
        ):
            if whole is not None and part is not None and whole % part != 0:
                raise ValueError(f"{name} = {whole:g} is not a multiple of {unit} = {part:g}")
        sizes = (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("ep", self.ep))
        for name, size in sizes:
            if size is not None and size > self.gpus:
                raise ValueError(f"{name} = {size:g} is larger than the number of GPUs, {self.gpus:g}")
        if self.pp == 1 and self.vpp > 1:
            raise ValueError(f"vpp = {self.vpp:g} needs pp, but pp is 1")
        if self.out_of_memory and self.step_seconds is not None:
            raise ValueError("a run that ran out of memory has no step_seconds; leave one of the two columns empty")
        return self


NEEDED = (
    *(name for name, field in MeasuredRow.model_fields.items() if field.is_required()),
    "machine", "layers", "hidden", "heads", "seq_len", "global_batch", "micro_batch", "tp", "pp", "sharding",
    "recompute",
)  # fmt: skip
"""Columns that every table must have. Every row must have a value in gpus, precision, and program. The columns sharding
and recompute may be empty. If any other of these columns is empty, ``rows.row_of`` skips the row."""


def check_header(names: list[str]) -> str | None:
    """Return what is wrong with the column names of a table, for an error message. Return None if they are correct."""
    known = MeasuredRow.model_fields
    if missing := [name for name in NEEDED if name not in names]:
        hint = "; its columns must be separated by commas" if any(";" in name for name in names) else ""
        return f"has no column {', '.join(missing)}; docs/measured-rows.md lists the columns{hint}"
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"has two columns {twice}; keep one"
    if unknown := next((name for name in names if name not in known), None):
        close = difflib.get_close_matches(unknown, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "remove it, or keep its text in notes"
        return f"has an unknown column {unknown!r}; {hint}"
    return None


def parse_cells(cells: Mapping[str, str]) -> MeasuredRow:
    """Parse the nonempty cells of a row. Raise ``ValueError`` with a sentence that names the column if a value is
    missing or invalid."""
    try:
        return MeasuredRow.model_validate(cells)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise ValueError(str(first["ctx"]["error"])) from None
        if first["type"] == "missing":
            raise ValueError(f"{first['loc'][0]} is empty; {_choices(str(first['loc'][0]))}") from None
        raise ValueError(mistake(first, MeasuredRow)) from None


def _choices(column: str) -> str:
    choices = get_args(MeasuredRow.model_fields[column].annotation)
    return f"give {', '.join(map(str, choices))}" if choices else "docs/measured-rows.md describes this column"
