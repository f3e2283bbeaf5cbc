"""From text on disk to the batch of one rank: tokenise, store, order, load, mask."""
