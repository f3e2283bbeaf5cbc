"""Split a micro-batch into batch parts. While one part's collectives run, another part computes."""
