"""Verify the training step. Parity compares its results with one process. A trace counts every byte that the step
stores and sends."""
