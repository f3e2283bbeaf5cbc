"""Predicts memory and time of a layout before anything runs: NumPy only, never imports torch."""
