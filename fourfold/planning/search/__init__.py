"""Find the fastest layouts that fit, and explain why they win."""
