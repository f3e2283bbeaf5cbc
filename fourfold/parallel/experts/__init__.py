"""Mixtures of experts on the grid: the router, the dispatch of tokens, and the load of experts."""
