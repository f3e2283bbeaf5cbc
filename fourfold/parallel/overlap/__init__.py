"""Batch parts: parts of a micro-batch that hide each other's collectives."""
