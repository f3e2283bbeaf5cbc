"""Describe machines: the rates and memory of their devices, and the bandwidths and latencies of their links."""
