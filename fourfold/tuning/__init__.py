"""Microbenchmarks of the user's own devices; the search for the fastest layout by real trials."""
