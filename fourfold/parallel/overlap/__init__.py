"""Batch parts: split a micro-batch into parts whose collectives hide behind each other's computation."""
