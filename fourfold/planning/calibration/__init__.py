"""Fit the planner's constants to measured steps, and compare its predictions with measurements."""
