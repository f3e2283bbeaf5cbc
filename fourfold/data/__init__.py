"""Turn text on disk into the batches of each rank: tokenize, store, order, load, and mask."""
