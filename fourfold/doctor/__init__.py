"""Examine a machine before a run: one file per subject, each with findings and what to do about them."""
