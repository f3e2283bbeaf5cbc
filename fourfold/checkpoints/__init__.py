"""Checkpoints that any grid reads."""
