"""Writes the job scripts of batch systems; sites are data."""
