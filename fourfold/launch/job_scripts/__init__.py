"""Write job scripts for batch systems. Each site is described in a data file."""
