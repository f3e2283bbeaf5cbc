"""The six-axis grid: layers, sharding, checkpoint metadata, parity and trace."""
