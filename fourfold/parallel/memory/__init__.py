"""Activation checkpointing, compilation, and offload to the CPU."""
