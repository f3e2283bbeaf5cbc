"""Run models: load them, generate text, and attend to selected keys with Loki."""
