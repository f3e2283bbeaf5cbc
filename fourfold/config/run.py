"""The schema of the run file. ``ParallelConfig`` describes the axes of the grid: x, y, z, dp, cp, pp, and ep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fourfold.config.activation_checkpoint import ActivationCheckpointConfig
from fourfold.config.checks import ChecksConfig
from fourfold.config.data_section import DataConfig
from fourfold.config.during_training import (
    AuditConfig,
    DPOConfig,
    EMAConfig,
    EvaluationConfig,
    LossScalingConfig,
    SampleConfig,
    ValidationConfig,
)
from fourfold.config.fault_tolerance import FaultToleranceConfig
from fourfold.config.loss_masks import MasksConfig
from fourfold.config.low_rank import LoRAConfig
from fourfold.config.model import ModelConfig
from fourfold.config.moe import MoEConfig
from fourfold.config.optimizer_rules import OptimizerConfig
from fourfold.config.strict import PathText, Size, Strict

AXES = ("pp", "dp", "cp", "z", "y", "x")
"""The axes of the grid, outermost first. x is innermost, so the ranks of x are consecutive, in one node if they fit."""

AxisSize = Annotated[int, Field(ge=1, le=2**20)]

PipelineSchedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class ParallelConfig(Strict):
    """Sizes of the grid's axes. The product of x, y, z, dp, cp, and pp is the number of processes."""

    x: AxisSize = 1
    """Tensor parallel: split the output features of q, k, v, up, and gate. Between the layers, x splits the sequence.
    This axis communicates the most, so keep it inside a node."""
    y: AxisSize = 1
    """Second tensor-parallel axis: split the input features of q, k, v, up, and gate, and the channels of the residual
    stream. Use y if x alone would become too large."""
    z: AxisSize = 1
    """Split the batch, and shard weights, gradients, and optimizer states (FSDP)."""
    dp: AxisSize = 1
    """Split the batch (data parallel). Weights are replicated unless `zero` shards them."""
    cp: AxisSize = 1
    """Split the sequence (context parallel). Use it for long sequences."""
    pp: AxisSize = 1
    """Split the layers into stages (pipeline parallel)."""
    ep: AxisSize = 1
    """Split the experts over this many neighboring processes of dp·cp·z. ep adds no processes to the grid, because it
    uses the processes of these axes."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage: what to shard over dp·cp, in addition to z. 0: nothing. 1: stored weights and optimizer states. 2:
    also gradients. 3: also the weights that the layers compute with."""

    cp_method: Literal["auto", "ring", "ulysses"] = "auto"
    """How cp splits attention. `ring` passes keys and values around a ring. `ulysses` gives each rank all tokens of
    some heads. `auto` uses ulysses if the heads can be divided evenly, and ring otherwise."""
    schedule: PipelineSchedule = "1F1B"
    """Pipeline schedule ([pipeline.md](pipeline.md#schedules)). The names are torch's names."""
    stages_per_rank: int = Field(2, ge=2)
    """Number of stages per pp rank in LoopedBFS and the two Interleaved schedules. ZBVZeroBubble and DualPipeV always
    have 2. GPipe and 1F1B have 1. More stages shorten the time that ranks wait, but add transfers."""
    layers_per_stage: tuple[int, ...] | None = Field(None, strict=False, examples=[(4, 4)])
    """Number of layers in each stage. By default, fourfold balances the work, including the embedding and the head."""

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.pp * self.dp * self.cp * self.z * self.y * self.x

    def describe(self) -> str:
        """Return one line of text that lists the sizes of the grid's axes, without axes of size 1."""
        sizes = [f"{axis} {size}" for axis in (*AXES, "ep") if (size := getattr(self, axis)) > 1]
        return " × ".join(sizes or ["one process"]) + (f", zero {self.zero}" if self.zero else "")

    @property
    def batch_ranks(self) -> int:
        """Return the number of ranks that the batch is split over."""
        return self.dp * self.z


class OverlapConfig(Strict):
    """Overlap of communication with computation ([overlap.md](overlap.md)). You can turn off each kind of overlap to
    measure its effect."""

    input_gradients: bool = True
    """Sum a linear layer's input gradient over ranks while the layer's weight gradient is computed."""
    gate_sum: bool = True
    """Sum the gate's output over y while the up projection is computed."""
    batch_parts: int = Field(1, ge=1)
    """Split each micro-batch into this many parts (default 1). While the collectives of one part run over x and y,
    another part computes. More parts hide more communication, but each matmul gets smaller. The number must divide
    micro_batch_size or the number of tokens of a sequence on one rank. Works with the models that float8 works with."""
    weight_prefetch: int = Field(1, ge=0)
    """Number of layers whose weights are gathered ahead of time (default 1). Higher values hide more communication and
    use more memory. 0 gathers nothing ahead."""
    shards_per_node: int = Field(1, ge=1)
    """Number of ranks of a shard group on each node: the GPUs per node / (x·y). A shard group is the ranks of z, or
    the ranks of dp·cp·z if parallel.zero is above 0. Above 1, the group's collectives run in two levels, inside nodes
    and across nodes. 1 (default) runs one ring over all ranks."""


class TrainingConfig(Strict):
    micro_batch_size: Size = 1
    """Number of sequences that go through one forward and backward pass together on one rank."""
    global_batch_size: Size = Field(examples=[32])
    """Number of sequences per optimizer step, over all ranks."""
    seq_length: Size = Field(examples=[1024])
    """Number of tokens per sequence."""
    train_steps: int = Field(examples=[1000], gt=0)
    """Number of optimizer steps in the run."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype of weights and activations in the forward and backward pass. fp16 uses [loss_scaling](#loss_scaling)."""
    master_weights: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the stored weights and optimizer states. bf16 halves their memory and needs precision = 'bf16'."""
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Dtype in which gradients are summed over micro-batches and over ranks: fp32, or the dtype of `precision`. A
    16-bit dtype halves the memory and the traffic of gradients, but loses accuracy with every micro-batch."""
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    """Run the blocks' matmuls in float8 with this torchao recipe. Needs precision = 'bf16' and a GPU with float8.
    Not for MoE models, multi-token prediction, or latent, linear, or gated attention."""
    tuned_products: Literal["off", "cached", "measured"] = "off"
    """Memory layouts of the blocks' matmuls. `off` uses the default layouts. `cached` uses the fastest layouts that
    `fourfold machine tune-matmul` found on this machine. `measured` does the same, but first measures the
    run's matmul sizes that have no result yet."""
    compile: bool = False
    """Compile each block with torch.compile. Not for MoE models, linear attention, or multi-token prediction."""
    mtp_loss_weight: float = Field(0.1, gt=0)
    """Weight of the loss for multi-token prediction. This loss is the mean loss of the extra layers that
    model.num_nextn_predict_layers adds."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the samples."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. `auto` uses GPUs if the machine has any, and the CPU otherwise."""

    @model_validator(mode="after")
    def _types_fit(self) -> TrainingConfig:
        if self.master_weights not in ("fp32", self.precision):
            raise ValueError(
                f"master_weights = '{self.master_weights}' needs training.precision = 'bf16', but it is "
                f"'{self.precision}'; master_weights = 'fp32' works"
            )
        if self.reduce_dtype not in ("fp32", self.precision):
            raise ValueError(
                f"reduce_dtype = '{self.reduce_dtype}' must be 'fp32' or training.precision = '{self.precision}'; "
                "reduce_dtype = 'fp32' works"
            )
        if self.float8 != "none" and self.precision != "bf16":
            raise ValueError(
                f"float8 = '{self.float8}' needs training.precision = 'bf16', but it is '{self.precision}'; float8 = "
                "'none' works"
            )
        return self


class SchedulerConfig(Strict):
    warmup_steps: int = Field(0, ge=0)
    """Number of steps during which the learning rate rises linearly to optimizer.lr."""
    decay_style: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """How the learning rate falls after the warm-up. `wsd` lowers it only at the end. `constant` does not lower it."""
    decay_ratio: float = Field(0.2, gt=0, le=1)
    """wsd: the learning rate falls during this fraction of the run's steps, at the end of the run."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end of the run, as a fraction of optimizer.lr. Not used if decay_style is 'constant'."""


class CheckpointConfig(Strict):
    interval: int = Field(0, ge=0)
    """Number of steps between checkpoints. With 0, a checkpoint is saved only when the run ends (`save_last`), when it
    is stopped, and after a validation with a new lowest loss (`validation.keep_best`)."""
    save_last: bool = True
    """Save a checkpoint after the last step. A run that is stopped by a signal or a time limit always saves one."""
    keep_latest_k: int = Field(2, ge=0)
    """Number of recent checkpoints to keep. Older checkpoints are removed. 0 keeps all."""
    keep_every: int = Field(0, ge=0)
    """Never remove a checkpoint if its step is a multiple of this number. 0 disables this rule."""
    async_mode: Literal["disabled", "async"] = "disabled"
    """`async` continues training while a checkpoint is written. `disabled` waits."""
    on_failed_save: Literal["warn", "stop"] = "warn"
    """What to do if a checkpoint cannot be written, for example on a full disk: continue with a warning, or end the
    run. A run always ends if it cannot write its last checkpoint."""
    resume: PathText = "auto"
    """Checkpoint to resume from: the run's newest checkpoint ('auto'), or the path of a checkpoint. 'never' starts
    without a checkpoint."""


class MetricsConfig(Strict):
    log_interval: int = Field(10, gt=0)
    """Number of steps between log lines if the output is not a terminal."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs the extra `tensorboard`)."""
    wandb: bool = False
    """Also record the run in Weights & Biases (needs the extra `wandb`)."""
    project: str = Field("fourfold", min_length=1, max_length=128)
    """Project of the run in Weights & Biases."""
    machine: PathText | None = None
    """Name of one of the planner's machines, or a machine file. After ten steps, the run compares its speed with the
    planner's prediction for this machine. On a CPU, you need a file from `fourfold machine calibrate`."""


class RunConfig(Strict):
    """A complete run file."""

    name: PathText = Field("run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")
    """Name of the run. Its folder inside output_dir has the same name."""
    output_dir: PathText = "runs"
    """Folder that contains the folders of all runs."""
    model: ModelConfig = Field(examples=[{"preset": "gpt2"}])
    data: DataConfig = Field(examples=[{"source": "python-stdlib"}])
    masks: MasksConfig = MasksConfig()
    moe: MoEConfig = MoEConfig()
    parallel: ParallelConfig = ParallelConfig()
    overlap: OverlapConfig = OverlapConfig()
    training: TrainingConfig = Field(examples=[{"global_batch_size": 32, "seq_length": 1024, "train_steps": 1000}])
    activation_checkpoint: ActivationCheckpointConfig = ActivationCheckpointConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoRAConfig = LoRAConfig()
    dpo: DPOConfig = DPOConfig()
    ema: EMAConfig = EMAConfig()
    loss_scaling: LossScalingConfig = LossScalingConfig()
    lr_scheduler: SchedulerConfig = SchedulerConfig()
    checks: ChecksConfig = ChecksConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    fault_tolerance: FaultToleranceConfig = FaultToleranceConfig()
    metrics: MetricsConfig = MetricsConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    audit: AuditConfig = AuditConfig()
    sample: SampleConfig = SampleConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        if conflict := next(_conflicts(self), None):
            raise ValueError(conflict)
        return self

    @property
    def gradient_accumulation_steps(self) -> int:
        """Return the number of micro-batches that each rank runs per optimizer step."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallel.batch_ranks)


def _conflicts(run: RunConfig) -> Iterator[str]:
    """Yield an error message for each key that does not fit another section. The message says what would work."""
    training = run.training
    if run.optimizer.stochastic_rounding and training.master_weights != "bf16":
        yield (
            "optimizer.stochastic_rounding = true needs training.master_weights = 'bf16', but it is 'fp32'; "
            "stochastic_rounding = false works"
        )
    if training.global_batch_size % run.data.streams:
        yield (
            f"data.streams = {run.data.streams} does not divide training.global_batch_size = "
            f"{training.global_batch_size}; data.streams = {math.gcd(run.data.streams, training.global_batch_size)} "
            "works"
        )
    yield from _conflicts_with_the_model(run)
    if run.audit.interval and run.audit.suffix > training.seq_length:
        yield (
            f"audit.suffix = {run.audit.suffix} is more than training.seq_length = {training.seq_length}, and "
            f"canaries are cut to this length; audit.suffix = {training.seq_length} works"
        )
    if run.lora.rank:
        yield from _conflicts_of_adapters(run)
    if run.dpo.beta:
        yield from _conflicts_of_pairs(run)
    elif run.data.format == "preferences":
        yield "data.format = 'preferences' is for [dpo], but dpo.beta = 0; dpo.beta = 0.1 works"
    unpredicted = {"lora": run.lora.rank, "dpo": run.dpo.beta}
    for section in (name for name, given in unpredicted.items() if given and run.metrics.machine is not None):
        yield (
            f"metrics.machine = '{run.metrics.machine}' compares with the planner, which does not predict {section}; "
            "leave metrics.machine out"
        )
    for key in ("non_finite", "spike"):
        if getattr(run.checks, key) == "roll_back" and not run.checkpoint.interval:
            yield (
                f"checks.{key} = 'roll_back' returns to a checkpoint, but checkpoint.interval = 0 saves none before "
                "the end; checkpoint.interval = 100 works"
            )


def _conflicts_with_the_model(run: RunConfig) -> Iterator[str]:
    """Yield an error message for each setting that needs layers or biases that the model lacks."""
    moe, weight, default = run.moe, run.training.mtp_loss_weight, TrainingConfig.model_fields["mtp_loss_weight"].default
    if weight != default and not run.model.num_nextn_predict_layers:
        yield f"training.mtp_loss_weight = {weight} needs model.num_nextn_predict_layers > 0; {default} works"
    key = next((key for key in MoEConfig.model_fields if getattr(moe, key)), "")
    if key and not run.model.num_experts:
        yield f"moe.{key} = {getattr(moe, key)} is for MoE models, but model.num_experts = 0; moe.{key} = 0 works"
    if moe.bias_update_rate and not run.model.router_bias:
        yield (
            f"moe.bias_update_rate = {moe.bias_update_rate} needs model.router_bias, which is false; "
            "router_bias = true works, and so does bias_update_rate = 0"
        )


def _conflicts_of_adapters(run: RunConfig) -> Iterator[str]:
    """Yield an error message for each setting that does not work with LoRA."""
    rank = run.lora.rank
    if run.parallel.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        yield (
            f"parallel.schedule = '{run.parallel.schedule}' computes weight gradients separately, but lora.rank = "
            f"{rank} leaves almost none; schedule = '1F1B' or 'Interleaved1F1B' works"
        )
    if run.training.float8 != "none":
        yield (
            f"lora.rank = {rank} keeps frozen weights in bf16, but training.float8 = '{run.training.float8}'; set "
            "training.float8 = 'none'"
        )
    if run.moe.bias_update_rate:
        yield (
            f"lora.rank = {rank} freezes the biases of routers, but moe.bias_update_rate = {run.moe.bias_update_rate} "
            "changes them; moe.bias_update_rate = 0 works"
        )


def _conflicts_of_pairs(run: RunConfig) -> Iterator[str]:
    """Yield an error message for each setting that does not work with preference optimization ([dpo])."""
    beta, micro_batch_size, strategy = run.dpo.beta, run.training.micro_batch_size, run.masks.goldfish.strategy
    if run.data.format != "preferences":
        yield (
            f"dpo.beta = {beta} compares answers in pairs, but data.format = '{run.data.format}' has none; "
            "data.format = 'preferences' works, or dpo.beta = 0"
        )
    if micro_batch_size % 2:
        yield (
            f"training.micro_batch_size = {micro_batch_size} must be even with dpo: the two answers of a pair are in "
            f"one micro-batch; micro_batch_size = {micro_batch_size + 1} works"
        )
    if strategy != "none":
        yield (
            f"dpo.beta = {beta} compares whole answers, but masks.goldfish.strategy = '{strategy}' leaves tokens out; "
            "strategy = 'none' works"
        )
    if run.moe.capacity_factor:
        yield (
            f"moe.capacity_factor = {run.moe.capacity_factor} drops tokens in training, but dpo compares with a "
            "reference that drops none; set moe.capacity_factor = 0"
        )
