"""Activation checkpointing, and offload to the host."""
