"""Data parallelism: replicated or sharded weights, and gradients summed over ranks."""
