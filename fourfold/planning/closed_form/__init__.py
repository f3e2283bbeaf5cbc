"""Bytes of fourfold's own grid in closed form; equal to the trace."""
