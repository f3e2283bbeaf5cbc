"""The grid's layers in models of other libraries."""
