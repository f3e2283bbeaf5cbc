"""The training job: loop, optimizer, checkpoint, metrics."""
