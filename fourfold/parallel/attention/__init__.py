"""Attention on the grid: context parallelism, windows, documents."""
