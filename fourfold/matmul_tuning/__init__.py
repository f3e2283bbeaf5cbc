"""Memory layouts of matmuls: measure them on this machine, and keep the fastest."""
