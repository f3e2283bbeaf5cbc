"""Data, from text on disk to the batch of one rank: tokenize, store, order, load, and mask."""
