"""Fits the planner's constants to measured steps, and scores its predictions against measurements."""
