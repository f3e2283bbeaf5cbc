"""Use fourfold's parallel layers in models of other libraries."""
