"""Sections of docs/planner_validation.md, one file per section."""
