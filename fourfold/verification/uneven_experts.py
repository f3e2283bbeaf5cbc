"""Make one expert of each layer the choice of every token, and one the choice of none."""

from __future__ import annotations

import torch

from fourfold.models.mixture import is_router_bias
from fourfold.training.job import Job

OUTWEIGHS_SCORES = 4.0
"""Scores are at most 1."""


def skew_router_biases(job: Job) -> None:
    """Set the biases of the job's routers. Every process calls this.

    A router favors one expert if a token has several, and it rules out another one. The two change with the layer.
    Checkpoints of LoRA do not save the biases, so with LoRA they stay zero.
    """
    experts = job.run.model.num_experts
    for shard in job.shards if not job.run.lora.rank else ():
        if is_router_bias(shard.name):
            bias_E, first = torch.zeros(experts), int(shard.name.split(".")[1])
            bias_E[first % experts] = OUTWEIGHS_SCORES * (job.run.model.num_experts_per_tok > 1)
            bias_E[(first + 1) % experts] = -OUTWEIGHS_SCORES
            shard.local.copy_(bias_E[shard.slices])
    job.publish()
