"""Train a model: the training loop, the optimizer, the checks of each step, and the record of a run."""
