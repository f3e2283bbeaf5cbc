"""Hugging Face models: weight names, import, export, adapters, tokenizers, and any model on the grid."""
