"""Fit the planner's constants to measured steps, and compare the planner's predictions with measurements."""
