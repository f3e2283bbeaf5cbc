"""Write job scripts for batch systems. Sites are data files."""
