"""Verify the training step. Parity compares the step's results with the results of one process. A trace counts
every byte that the step stores and sends."""
