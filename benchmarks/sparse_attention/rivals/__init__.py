"""Sparse-attention methods, which choose the keys that a decoding step reads."""
