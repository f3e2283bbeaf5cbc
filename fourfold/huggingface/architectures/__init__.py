"""The transformers architectures that the decoder can compute, and their config.json. Nothing here imports torch."""
