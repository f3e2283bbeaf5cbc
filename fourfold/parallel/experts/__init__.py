"""Mixtures of experts on the grid: router, dispatch, load."""
