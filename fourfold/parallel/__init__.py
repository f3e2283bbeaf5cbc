"""The grid with six axes, the parallel layers on it, and the code that lays out a model over it."""
