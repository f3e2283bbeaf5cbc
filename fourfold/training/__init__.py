"""Train a model: the trainer, a job and its step, the optimizer, checks of steps, and the record of a run."""
