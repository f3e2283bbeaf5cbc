"""One small file per command. It parses the arguments, calls one function, and prints the result."""
