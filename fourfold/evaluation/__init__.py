"""Evaluation: perplexity on text, and the tasks of lm-eval."""
