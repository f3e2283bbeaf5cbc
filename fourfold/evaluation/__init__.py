"""Evaluate models: perplexity on text, and lm-eval's tasks."""
