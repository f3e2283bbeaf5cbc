"""Start the processes of a job, or use the processes that torchrun or srun has started."""
