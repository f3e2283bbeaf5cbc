"""Running models: loading, generating text, and attention with low-rank keys."""
