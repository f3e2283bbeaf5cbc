"""Pipeline schedules, and one step of a pipeline."""
