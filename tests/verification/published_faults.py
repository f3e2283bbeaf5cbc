"""List published bugs of other programs, each with the planted fault that is the same bug in fourfold."""

from __future__ import annotations

PUBLISHED = {
    "AReno #496": (
        "the gradient of the key that heads share is not summed over y",
        "every batch, with latent attention",
    ),
    "Automodel #2131": (
        "the convolution of linear attention leaks into the next document",
        "packed documents, with linear attention",
    ),
    "axolotl #3033": (
        "each rank divides its loss by its own number of labels, even if this number is 0",
        "a micro-batch without labels",
    ),
    "DeepSpeed #2695, fairseq2 #1374": (
        "gradients are clipped before the loss scale is removed",
        "a step whose gradient norm is below the clipping limit",
    ),
    "DeepSpeed #8432": ("a step that overflows changes Muon's momentum", "a step that overflows"),
    "EasyR1 #57, KempnerForge #51": (
        "a resumed run reads its data from the beginning",
        "the trainer's first batch after resuming",
    ),
    "Megatron-LM #1446": ("gradients of norm layers and biases are not summed over y", "every batch"),
    "Megatron-LM #4494": (
        "prediction layers read the next document's tokens",
        "packed documents, with multi-token prediction",
    ),
    "Megatron-LM #6717, #7207": ("the validation loss covers only one rank", "labels spread unevenly over ranks"),
    "Megatron-LM #6839": (
        "the gradient of the key that heads share is not summed over x",
        "every batch, with latent attention",
    ),
    "Megatron-LM #7452": (
        "the gradient of linear attention's gated norm is not summed over y",
        "every batch, with linear attention",
    ),
    "optimum-intel #1877": (
        "attention scores lack YaRN's factor from mscale_all_dim",
        "every batch, with latent attention and YaRN",
    ),
    "prime-rl #3002": (
        "with cp, linear attention ignores document boundaries",
        "packed documents, with linear attention",
    ),
    "prime-rl #3002, second bug": (
        "the convolution of linear attention does not read the last tokens of the previous cp rank",
        "every batch, with linear attention",
    ),
    "slime #1686, Automodel #2131": (
        "the state of linear attention leaks into the next document",
        "packed documents, with linear attention",
    ),
    "TransformerEngine #715 (ROCm)": (
        "the gradient norm counts a weight once for each rank that has a copy",
        "every batch",
    ),
    "transformers #34191": (
        "the loss is a mean over micro-batches, not over the tokens of a step",
        "labels spread unevenly over micro-batches",
    ),
    "verl #3562, miles #3219": (
        "the mask of answers is one token early",
        "batches in which only some tokens are answers",
    ),
}
"""Maps a program and issue to the planted fault and to the batch that reveals it."""
