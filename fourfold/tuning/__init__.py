"""Measurements on the user's own devices."""
