"""Split a micro-batch into batch parts, whose collectives hide behind each other's computation."""
