"""Mixtures of experts on the grid: router, dispatch, and load."""
