"""How good a model is: perplexity on text, and the tasks of lm-eval."""
