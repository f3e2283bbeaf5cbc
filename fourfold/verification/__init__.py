"""Verify the training step. The parity check compares the results of a grid of processes with the results of one
process. The trace counts every byte that one rank stores and sends in a step."""
