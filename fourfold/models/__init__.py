"""Single-device models in plain PyTorch, with no word of parallelism."""
