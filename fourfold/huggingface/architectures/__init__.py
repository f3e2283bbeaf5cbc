"""Describe the transformers architectures that fourfold's decoder can compute, and read and write their config.json.
Nothing here imports torch."""
