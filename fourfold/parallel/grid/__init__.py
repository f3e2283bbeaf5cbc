"""The grid of processes: each process has a position on six axes."""
