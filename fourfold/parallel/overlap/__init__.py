"""Split a micro-batch into batch parts, so that one part computes while another part's collectives run."""
