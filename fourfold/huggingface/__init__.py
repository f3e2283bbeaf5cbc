"""Hugging Face models: names, import, export, adapters, and any of them on the grid."""
