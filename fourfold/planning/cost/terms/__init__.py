"""The terms of a training step's time, one file per term."""
