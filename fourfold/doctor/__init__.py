"""Examines a machine before a run: one file per subject, each gives findings with what to do."""
