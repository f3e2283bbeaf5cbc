"""Compute the cost of a layout: the time of each part of a step, and the bytes of the rank that needs the most
memory."""
