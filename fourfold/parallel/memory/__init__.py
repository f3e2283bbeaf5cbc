"""Activation checkpointing, compilation, and offload of activations to CPU memory."""
