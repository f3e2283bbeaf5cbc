"""Write job scripts for batch systems. A data file describes the conventions of each cluster."""
