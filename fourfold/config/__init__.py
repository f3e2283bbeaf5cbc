"""The schema of the run file. It is strict, and covers everything that a run depends on."""
