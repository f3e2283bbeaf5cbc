"""Data parallelism: whole or sharded weights, and the sums of their gradients."""
