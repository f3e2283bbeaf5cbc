"""Examine a machine before a run. Each file examines one subject, and returns findings with advice."""
