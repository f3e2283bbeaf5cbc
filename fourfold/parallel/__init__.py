"""Split a model over a grid of processes.

- The tensor axes x and y split every layer.
- z and dp split the batch. z also shards the weights.
- cp splits the sequences.
- pp splits the model into stages of consecutive layers.
- ep splits the experts of mixture-of-experts layers.
"""
