"""Compare Loki with other ways to choose keys, on a small model that was trained for the comparison.

python -m benchmarks.sparse_attention --help
"""
