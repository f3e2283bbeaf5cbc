"""Fits the constants to measured steps, and compares predictions with measurements."""
