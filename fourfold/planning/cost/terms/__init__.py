"""What a training step spends its time on: one file for each term."""
