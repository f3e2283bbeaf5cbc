"""Machines: what a device computes and holds, and what carries data between devices."""
