"""The sections of the run file."""

from __future__ import annotations

import math
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
"""The grid's axes, outermost first: x is fastest, so that its groups fall inside a node."""

AxisSize = Annotated[int, Field(ge=1, le=2**20)]

Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]


class ParallelConfig(Strict):
    """Sizes of the grid's axes; their product is the number of processes."""

    x: AxisSize = Field(1, description="Tensor axis: output features of q, k, v, up, gate; the sequence in between.")
    y: AxisSize = Field(1, description="Tensor axis: input features of the same; the residual's hidden size.")
    z: AxisSize = Field(1, description="Splits the batch and the stored weights (FSDP).")
    dp: AxisSize = Field(1, description="Splits the batch; weights are replicated, or sharded by `zero`.")
    cp: AxisSize = Field(1, description="Splits the sequence (context parallel).")
    pp: AxisSize = Field(1, description="Splits the layers (pipeline parallel).")
    ep: AxisSize = Field(
        1, description="Splits the experts over that many neighbors among the dp·cp·z processes; it makes no new ones."
    )
    zero: Literal[0, 1, 2, 3] = Field(
        0, description="Also sharded over dp·cp: 1 optimizer states, 2 also gradients, 3 also parameters."
    )

    cp_method: Literal["auto", "ring", "ulysses"] = Field(
        "auto",
        description="Attention over cp: ring passes keys and values around, ulysses exchanges heads for tokens; auto: "
        "ulysses where the heads divide.",
    )
    schedule: Schedule = Field("1F1B", description="Order in which pp runs the micro-batches, by torch's names.")
    stages_per_rank: int = Field(
        2, ge=2, description="Stages of one rank of pp in the interleaved schedules; the V-shaped have 2, the others 1."
    )
    layers_per_stage: tuple[int, ...] | None = Field(
        None,
        strict=False,
        examples=[(4, 4)],
        description="Layers of each stage. Default: balanced, counting embedding and head.",
    )

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.z * self.y * self.x

    def describe(self) -> str:
        """The grid in one line, axes of size 1 left out."""
        sizes = [f"{axis} {size}" for axis in (*AXES, "ep") if (size := getattr(self, axis)) > 1]
        return " × ".join(sizes or ["one process"]) + (f", zero {self.zero}" if self.zero else "")

    @property
    def batch_ranks(self) -> int:
        """Ranks that the batch is split over."""
        return self.dp * self.z


class OverlapConfig(Strict):
    """Communication that runs during computation; each part can be switched off to measure its gain."""

    input_gradients: bool = Field(True, description="OAR: reduce dI of a linear layer while dW is computed.")
    gate_sum: bool = Field(True, description="Sum the product of gate over y while that of up is computed.")
    batch_parts: int = Field(
        1,
        ge=1,
        description="Parts of a micro-batch that take turns: one computes while the collectives of the others run over "
        "x and y. They divide micro_batch_size, else a rank's tokens of a sequence; no effect where x·y = 1.",
    )
    weight_prefetch: int = Field(
        1, ge=0, description="OAG: layers whose weights are gathered ahead of use; 0 gathers them when they are needed."
    )
    shards_per_node: int = Field(
        1,
        ge=1,
        description="Ranks of a shard group (z; with parallel.zero dp·cp·z) in a node: its GPUs / (x·y). More than 1: "
        "weights are gathered, and gradients summed, inside nodes and across them, not in one ring over all.",
    )


class TrainingConfig(Strict):
    micro_batch_size: Size = Field(1, description="Sequences that one rank runs at once.")
    global_batch_size: Size = Field(examples=[32], description="Sequences of one optimizer step, over all ranks.")
    seq_length: Size = Field(examples=[1024], description="Tokens of a sequence.")
    train_steps: int = Field(examples=[1000], gt=0, description="Optimizer steps of the whole run.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Type of weights and activations in the step; fp16 with loss scaling."
    )
    master_weights: Literal["fp32", "bf16"] = Field(
        "fp32", description="Type of the stored weights and optimizer states; bf16 only with precision = 'bf16'."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32",
        description="Type in which gradients are summed, over the micro-batches of a step and over ranks, on every "
        "grid: fp32, or the same as `precision`, which halves their memory and traffic but loses accuracy with every "
        "micro-batch.",
    )
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = Field(
        "none",
        description="Matrix products of the blocks in 8-bit floats, by torchao's recipe of that name; with "
        "precision = 'bf16', on a GPU that has them.",
    )
    tuned_products: Literal["off", "cached", "measured"] = Field(
        "off",
        description="Memory layouts of the blocks' matrix products. cached: those that `fourfold machine "
        "tune-matmul` found to be faster on this machine; measured: it also runs at the start, for sizes that it has "
        "not measured.",
    )
    compile: bool = Field(False, description="torch.compile each block.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seeds the weights and the order of the samples.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs where there are any.")

    @model_validator(mode="after")
    def _types_fit(self) -> TrainingConfig:
        if self.master_weights not in ("fp32", self.precision):
            raise ValueError(
                f"master_weights = '{self.master_weights}' needs training.precision = 'bf16', and it is "
                f"'{self.precision}'; master_weights = 'fp32' works"
            )
        if self.reduce_dtype not in ("fp32", self.precision):
            raise ValueError(
                f"reduce_dtype = '{self.reduce_dtype}' must be 'fp32' or training.precision = '{self.precision}'; "
                "reduce_dtype = 'fp32' works"
            )
        if self.float8 != "none" and self.precision != "bf16":
            raise ValueError(
                f"float8 = '{self.float8}' needs training.precision = 'bf16', and it is '{self.precision}'; "
                "float8 = 'none' works"
            )
        return self


class LossScalingConfig(Strict):
    """Loss scaling of training.precision = 'fp16'."""

    initial: float = Field(65536.0, gt=0, description="Initial loss scale.")
    growth_interval: int = Field(2000, gt=0, description="Steps without overflow after which the scale doubles.")
    max_overflows: int = Field(20, ge=1, description="Overflows in a row after which the run ends.")


class SchedulerConfig(Strict):
    warmup_steps: int = Field(0, ge=0, description="Steps of linear warm-up.")
    decay_style: Literal["cosine", "linear", "wsd", "constant"] = Field(
        "cosine", description="wsd: constant until the last `decay_ratio` of the run, then linear."
    )
    decay_ratio: float = Field(0.2, gt=0, le=1, description="wsd: share of the steps in which the rate decays.")
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="Final rate relative to optimizer.lr.")


class CheckpointConfig(Strict):
    interval: int = Field(0, ge=0, description="Steps between checkpoints; 0 saves only at the end.")
    save_last: bool = Field(True, description="Save when the run ends.")
    keep_latest_k: int = Field(2, ge=0, description="Older checkpoints are removed; 0 keeps all.")
    keep_every: int = Field(0, ge=0, description="Checkpoints of every n-th step are never removed; 0: none is kept.")
    async_mode: Literal["disabled", "async"] = Field("disabled", description="async: training goes on while it saves.")
    on_failed_save: Literal["warn", "stop"] = Field(
        "warn",
        description="After a checkpoint that cannot be written, as on a full disk: go on with a warning, or end the "
        "run. Where it is the last of the run, that always ends with an error.",
    )
    resume: PathText = Field(
        "auto", description="'auto': the newest in the run's folder; 'never'; or a checkpoint's path."
    )


class MetricsConfig(Strict):
    log_interval: int = Field(10, gt=0, description="Steps between lines when the output is not a terminal.")
    tensorboard: bool = Field(False, description="Also write TensorBoard events (needs the extra `tensorboard`).")
    wandb: bool = Field(False, description="Also record the run in Weights & Biases (needs the extra `wandb`).")
    trackio: bool = Field(False, description="Also record the run in Trackio (needs the extra `trackio`).")
    project: str = Field(
        "fourfold", min_length=1, max_length=128, description="Project of the run in Weights & Biases and Trackio."
    )
    machine: PathText | None = Field(
        None,
        description="A machine of the planner, or a machine file: after ten steps, the prediction for it is shown "
        "beside the measurement. On a CPU only with a file that `fourfold machine calibrate` has written.",
    )


class RunConfig(Strict):
    """A whole run."""

    name: PathText = Field(
        "run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="Folder of the run inside output_dir."
    )
    output_dir: PathText = Field("runs", description="Folder that holds the folders of all runs.")
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
    def _rounding_needs_bf16(self) -> RunConfig:
        if self.optimizer.stochastic_rounding and self.training.master_weights != "bf16":
            raise ValueError(
                "optimizer.stochastic_rounding = true needs training.master_weights = 'bf16', and it is 'fp32'; "
                "stochastic_rounding = false works"
            )
        return self

    @model_validator(mode="after")
    def _streams_share_the_batch(self) -> RunConfig:
        if self.training.global_batch_size % self.data.streams:
            raise ValueError(
                f"data.streams = {self.data.streams} does not divide training.global_batch_size = "
                f"{self.training.global_batch_size}; data.streams = "
                f"{math.gcd(self.data.streams, self.training.global_batch_size)} works"
            )
        return self

    @model_validator(mode="after")
    def _there_are_experts(self) -> RunConfig:
        given = [key for key in MoEConfig.model_fields if getattr(self.moe, key)]
        if given and not self.model.num_experts:
            raise ValueError(
                f"moe.{given[0]} = {getattr(self.moe, given[0])} is for mixtures of experts, and "
                f"model.num_experts = 0; moe.{given[0]} = 0 works"
            )
        if self.moe.bias_update_rate and not self.model.router_bias:
            raise ValueError(
                f"moe.bias_update_rate = {self.moe.bias_update_rate} moves a bias that the model lacks; set "
                "model.router_bias = true, or moe.bias_update_rate = 0"
            )
        return self

    @model_validator(mode="after")
    def _canaries_fit(self) -> RunConfig:
        if self.audit.interval and self.audit.suffix > self.training.seq_length:
            raise ValueError(
                f"audit.suffix = {self.audit.suffix} is more than training.seq_length = {self.training.seq_length}, "
                f"and a canary is cut to what the model sees; audit.suffix = {self.training.seq_length} works"
            )
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> RunConfig:
        if self.lora.rank and self.parallel.schedule in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            raise ValueError(
                f"parallel.schedule = '{self.parallel.schedule}' computes weight gradients apart, and with lora there "
                "are hardly any; schedule = '1F1B' or 'Interleaved1F1B' works"
            )
        if self.lora.rank and self.training.float8 != "none":
            raise ValueError(
                f"lora.rank = {self.lora.rank} keeps what it freezes in bf16, and training.float8 = "
                f"'{self.training.float8}'; set training.float8 = 'none'"
            )
        if self.lora.rank and self.moe.bias_update_rate:
            raise ValueError(
                f"lora.rank = {self.lora.rank} freezes the biases of routers, and moe.bias_update_rate = "
                f"{self.moe.bias_update_rate} moves them; moe.bias_update_rate = 0 works"
            )
        unpredicted = {"lora": self.lora.rank, "dpo": self.dpo.beta}
        for section in (name for name, given in unpredicted.items() if given and self.metrics.machine is not None):
            raise ValueError(
                f"metrics.machine = '{self.metrics.machine}' compares with the planner, which does not predict "
                f"{section}; leave metrics.machine out"
            )
        return self

    @model_validator(mode="after")
    def _pairs_stay_together(self) -> RunConfig:
        if not self.dpo.beta:
            if self.data.format == "preferences":
                raise ValueError("data.format = 'preferences' is for [dpo], and dpo.beta = 0; dpo.beta = 0.1 works")
            return self
        if self.data.format != "preferences":
            raise ValueError(
                f"dpo.beta = {self.dpo.beta} compares answers in pairs, and data.format = '{self.data.format}' has "
                "none; data.format = 'preferences' works, or dpo.beta = 0"
            )
        if self.training.micro_batch_size % 2:
            raise ValueError(
                f"training.micro_batch_size = {self.training.micro_batch_size} must be even with dpo: the two answers "
                f"of a pair are in one micro-batch; micro_batch_size = {self.training.micro_batch_size + 1} works"
            )
        if self.masks.goldfish.strategy != "none":
            raise ValueError(
                f"dpo.beta = {self.dpo.beta} compares whole answers, and masks.goldfish.strategy = "
                f"'{self.masks.goldfish.strategy}' leaves tokens out; strategy = 'none' works"
            )
        if self.moe.capacity_factor:
            raise ValueError(
                f"moe.capacity_factor = {self.moe.capacity_factor} drops rows in training, and dpo compares with a "
                "reference that drops none; set moe.capacity_factor = 0"
            )
        return self

    @model_validator(mode="after")
    def _a_roll_back_has_a_checkpoint(self) -> RunConfig:
        for key in ("non_finite", "spike"):
            if getattr(self.checks, key) == "roll_back" and not self.checkpoint.interval:
                raise ValueError(
                    f"checks.{key} = 'roll_back' returns to a checkpoint, and checkpoint.interval = 0 saves none "
                    "before the end; checkpoint.interval = 100 works"
                )
        return self

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that each rank runs before the optimizer steps."""
        return self.training.global_batch_size // (self.training.micro_batch_size * self.parallel.batch_ranks)
