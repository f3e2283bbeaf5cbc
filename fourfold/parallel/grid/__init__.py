"""The grid of processes, their process groups, and every collective."""
