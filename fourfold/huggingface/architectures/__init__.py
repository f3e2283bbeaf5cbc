"""transformers' architectures that the decoder computes, and their config.json. Nothing here imports torch."""
