"""Replicate or shard the weights, and sum the gradients over ranks (data parallelism)."""
