"""Compute the cost of a layout: the time of each part of a step, and the memory of the rank that needs the most."""
