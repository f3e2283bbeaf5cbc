"""Compute the cost of a layout: seconds of a step, part by part, and bytes of the fullest rank."""
