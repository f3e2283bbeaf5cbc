"""The run file: read, overridden, written, documented."""
