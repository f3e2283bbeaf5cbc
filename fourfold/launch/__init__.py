"""Start the processes of a job, or join the processes that torchrun or srun started."""
