"""The commands, with one small file each. A command parses its arguments, calls one function, and prints the result."""
