"""Ways to choose the keys that a decoding step reads, one method per file."""
