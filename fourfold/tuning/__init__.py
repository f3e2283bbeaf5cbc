"""Microbenchmarks of the user's own devices."""
