"""The grid of processes: each has a place on six axes."""
