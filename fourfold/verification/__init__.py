"""Verify the training step: parity with one process, and a trace of every byte that the step holds and sends."""
