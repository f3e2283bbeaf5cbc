"""Schedule the operations of pipeline stages, and run them."""
