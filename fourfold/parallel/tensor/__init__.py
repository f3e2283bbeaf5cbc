"""The tensor-parallel layers. They define which tile of each tensor a rank holds, and what the rank computes."""
