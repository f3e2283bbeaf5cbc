"""The audit: the training data that a model repeats, and the effect of a goldfish mask on it."""
