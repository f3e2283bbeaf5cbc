"""Layouts of matrix products: measures them on this machine, and keeps those that are fastest."""
