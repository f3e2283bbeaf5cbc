"""Pipeline schedules, and the step of a pipeline."""
