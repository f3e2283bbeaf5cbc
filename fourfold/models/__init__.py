"""Single-device models in plain PyTorch, without parallelism."""
