"""Split a model over a grid of processes: the grid with its six axes, the parallel layers, and the code that puts a
model on the grid. The tensor axes x and y split every layer, z and dp split the batch, cp splits the sequences, pp
splits the layers, and ep splits the experts."""
