"""Finds the fastest layouts that fit, and explains why they win."""
