"""Mixture-of-experts (MoE) layers on the grid: the router, the dispatch of tokens, and the experts' load."""
