"""Fit the planner's constants to measured steps, and compare predictions with measurements."""
