"""The 4D layers: which tile of each tensor a rank has, and what it computes."""
