"""The tensor-parallel layers: which tile of each tensor a rank holds, and what it computes."""
