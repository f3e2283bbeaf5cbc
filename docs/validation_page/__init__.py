"""Sections of docs/planner_validation.md, a file each."""
