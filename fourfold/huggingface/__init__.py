"""Import and export Hugging Face models with their adapters and tokenizers, and put any causal model on the grid."""
