"""Set the biases of a model's routers, to test uneven loads of experts. In each layer, one expert gets no token. If
each token goes to several experts, another expert gets every token."""

import torch

from fourfold.models.mixture import is_router_bias
from fourfold.training.job import Job

OUTWEIGHS_SCORES = 4.0
"""A bias of this size outweighs any score, because scores are at most 1."""


def skew_router_biases(job: Job) -> None:
    """Set the biases of the job's routers so that experts get uneven loads. If the routers have no biases, change
    nothing. Every process must call this.

    Afterwards, every router has one expert that it never chooses. If each token goes to several experts, every router
    also has one expert that it always chooses. In neighboring layers, these are different experts. With LoRA, the
    biases stay zero, because checkpoints of LoRA do not save them.
    """
    experts = job.run.model.num_experts
    for shard in job.shards if not job.run.lora.rank else ():
        if is_router_bias(shard.name):
            bias_E, first = torch.zeros(experts), int(shard.name.split(".")[1])
            bias_E[first % experts] = OUTWEIGHS_SCORES * (job.run.model.num_experts_per_tok > 1)
            bias_E[(first + 1) % experts] = -OUTWEIGHS_SCORES
            shard.local.copy_(bias_E[shard.slices])
    job.publish()
