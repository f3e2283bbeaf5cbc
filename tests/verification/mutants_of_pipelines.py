"""List faults in the step of a pipeline."""

from __future__ import annotations

from mutants import DEEP_GPT, DEEP_LLAMA, ONE_SEQUENCE, Mutant

PIPELINE = [
    Mutant(
        "gradients of a tied embedding are not summed over the first and the last stage",
        "parallel.pipeline.pipeline:EmbeddingCopies.sum_gradients",
        'gradient.add_(swap(gradient, self.holders, "gradients of the embedding\'s copies"))',
        "pass",
        DEEP_GPT,
        {"pp": 2},
        ONE_SEQUENCE,
    ),
    Mutant(
        "gradients of a tied embedding are not summed if one rank has the first and the last stage",
        "parallel.pipeline.pipeline:EmbeddingCopies.sum_gradients",
        "first.add_(last)",
        "first.add_(0)",
        DEEP_GPT,
        {"pp": 2, "schedule": "ZBVZeroBubble"},
        ONE_SEQUENCE,
    ),
    Mutant(
        "a pipeline runs the first micro-batch again instead of the other micro-batches",
        "parallel.pipeline.pipeline:_PipelineStep._forward",
        "self.micro_batches[op.micro_batch]",
        "self.micro_batches[0]",
        DEEP_LLAMA,
        {"pp": 2},
        ONE_SEQUENCE,
    ),
    Mutant(
        "with a pipeline, the gradients are not multiplied by the loss scale",
        "parallel.pipeline.pipeline:_PipelineStep._forward",
        "(out * self.loss_scale).sum()",
        "out.sum()",
        DEEP_LLAMA,
        {"pp": 2},
        ONE_SEQUENCE,
    ),
    Mutant(
        "a stage sums its gradients over dp after the first micro-batch, not after the last",
        "parallel.pipeline.pipeline:_PipelineStep._differentiate",
        "len(self.micro_batches)",
        "1",
        DEEP_LLAMA,
        {"pp": 2, "dp": 2},
        ONE_SEQUENCE,
    ),
]
