"""Compare Loki with other sparse-attention methods, on a small model that is trained for this comparison.

python -m benchmarks.sparse_attention --help
"""
