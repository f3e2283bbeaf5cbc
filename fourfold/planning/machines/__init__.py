"""Machines: rates and memory of their devices, and bandwidths and latencies of their links."""
