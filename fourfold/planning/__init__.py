"""Predict a layout's memory and time before anything runs. This package uses only NumPy and never imports torch."""
