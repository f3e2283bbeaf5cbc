"""The architectures of transformers that the decoder computes, and their config.json; without torch."""
