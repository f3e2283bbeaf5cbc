"""Predict the memory and step time of layouts before a run. This package uses only NumPy and never imports torch."""
