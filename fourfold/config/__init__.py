"""The run file: one strict schema for everything that a run depends on."""
