"""Measured rows against predictions."""
