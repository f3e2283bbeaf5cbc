"""Writes the job scripts of batch systems: for each system a module and its template; sites are data."""
