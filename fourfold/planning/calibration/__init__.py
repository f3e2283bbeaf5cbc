"""Fit the planner's constants to measured steps, and score its predictions against measurements."""
