"""Run models: load them, generate text, and attend with low-rank keys."""
