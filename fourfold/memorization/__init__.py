"""Measure which training data a model reproduces, and what a goldfish mask changes."""
