"""Use the grid's layers in models of other libraries."""
