"""Faults that only show in low precision: sums of gradients, stochastic rounding, and working copies of weights."""

from __future__ import annotations

from mutants import DEEP_LLAMA, DP2, X2, Z2, Mutant
from tiny_runs import LLAMA

BF16 = {"training": {"precision": "bf16"}}
BF16_SUMS = {"training": {"precision": "bf16", "reduce_dtype": "bf16"}}
TWO_MICRO_BATCHES = {"training": {"precision": "bf16", "global_batch_size": 4}}
ROUNDED = {
    "training": {"precision": "bf16", "master_weights": "bf16"},
    "optimizer": {"stochastic_rounding": True},
}

SUMS = [
    Mutant(
        "gradients are summed over ranks in the dtype of the step, not in reduce_dtype",
        "parallel.data.data_parallel:StepTypes.of",
        "DTYPES[training.reduce_dtype]",
        "DTYPES[training.precision]",
        grid=DP2,
        sections=TWO_MICRO_BATCHES,
    ),
    Mutant(
        "gradients are summed over micro-batches in the dtype of the step, not in reduce_dtype",
        "parallel.data.data_parallel:StepTypes.of",
        "DTYPES[training.reduce_dtype]",
        "DTYPES[training.precision]",
        grid=X2,
        sections=BF16,
    ),
    Mutant(
        "gradients are summed in float32, not in reduce_dtype",
        "parallel.data.data_parallel:StepTypes.of",
        "DTYPES[training.reduce_dtype]",
        "torch.float32",
        grid=Z2,
        sections=BF16_SUMS,
    ),
    Mutant(
        "in low precision, one gradient is 5 % too large",
        "parallel.data.replicated:Replicated.finish_gradients",
        "weight.finish_gradient()",
        "weight.finish_gradient()\n"
        "if self.types.working != torch.float32 and weight is list(self.weights.values())[2]:\n"
        "    weight.stored.grad *= 1.05",
        DEEP_LLAMA,
        DP2,
        BF16,
    ),
]

STORED = [
    Mutant(
        "stochastic rounding rounds to the nearest number",
        "training.optimizer:stochastically_rounded",
        "wide.view(torch.int32) + noise",
        "wide.view(torch.int32) + (1 << 15)",
        grid=DP2,
        sections=ROUNDED,
    ),
    Mutant(
        "stochastic rounding rounds up too rarely",
        "training.optimizer:stochastically_rounded",
        "wide.view(torch.int32) + noise",
        "wide.view(torch.int32) + noise // 2",
        LLAMA,
        X2,
        ROUNDED,
    ),
    Mutant(
        "a step does not update the working copies of the weights",
        "training.job:Job.update",
        "self.publish()",
        "pass",
        grid=X2,
        sections=BF16,
    ),
    Mutant(
        "the working copies of norms are updated only once",
        "parallel.data.replicated:Replicated.publish",
        "copies = [weight for weight in self.weights.values() if weight.working is not weight.stored]",
        "copies = [weight for weight in self.weights.values() if weight.working is not weight.stored]\n"
        "if hasattr(self, 'has_published'):\n"
        "    copies = [weight for weight in copies if weight.stored.ndim > 1]\n"
        "self.has_published = True",
        grid=DP2,
        sections=BF16,
    ),
]

DTYPES = [*SUMS, *STORED]
