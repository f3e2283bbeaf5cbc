"""The grid with six axes, the parallel layers on it, and the code that lays out a model over it. The tensor axes x and
y split every layer. z and dp split the batch, cp the sequences, and pp the layers. ep splits experts."""
