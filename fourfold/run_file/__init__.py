"""Read, override, write, and document run files."""
