"""Predict a layout's memory and time before anything runs. This room uses NumPy only and never imports torch."""
