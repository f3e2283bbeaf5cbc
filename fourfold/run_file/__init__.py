"""Read, override, and write run files."""
