"""Evaluate models by their perplexity on text and by lm-eval tasks."""
