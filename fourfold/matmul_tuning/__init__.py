"""Measure matmuls with different memory layouts on this machine, and choose the fastest layouts."""
