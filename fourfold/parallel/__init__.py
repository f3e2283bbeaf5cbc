"""The six-axis grid, the 4D layers on it, and how a model is laid out over it."""
