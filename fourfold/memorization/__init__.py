"""The audit: what a model would repeat of its training data, and what a goldfish mask changes about it."""
