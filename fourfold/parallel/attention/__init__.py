"""Attention on the grid, with context parallelism, sliding windows, and packed documents."""
