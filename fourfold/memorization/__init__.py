"""The audit: what a model repeats of its training data, and the effect of a goldfish mask on it."""
