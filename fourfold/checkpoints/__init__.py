"""Save, find, and load checkpoints that any grid can read."""
