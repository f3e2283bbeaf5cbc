"""Audit which training data a model reproduces, and measure the effect of a goldfish mask."""
