"""Measure the user's own devices, and search for the fastest layout with real trials."""
