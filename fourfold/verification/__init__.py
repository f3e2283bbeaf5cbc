"""Proofs about the training step: parity with one process, and a trace of every byte it holds and sends."""
