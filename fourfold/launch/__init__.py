"""Starts the processes of a job, or joins those of torchrun or srun."""
