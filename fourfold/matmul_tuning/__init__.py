"""Measure memory layouts of matmuls on this machine, and choose the fastest."""
