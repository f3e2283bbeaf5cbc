"""Hugging Face models: names, import, export, adapters, and any model on the grid."""
