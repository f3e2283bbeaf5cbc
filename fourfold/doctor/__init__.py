"""Examine a machine before a run. Each module examines one subject, such as the GPUs, and returns findings with
advice."""
