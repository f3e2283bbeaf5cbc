"""Data parallelism: whole or sharded weights, and sums of gradients over ranks."""
