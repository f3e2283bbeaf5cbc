"""The grid with six axes, the 4D layers on it, and the code that lays out a model over it."""
