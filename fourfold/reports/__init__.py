"""Turn records into HTML pages, charts, and terminal tables. This package computes no results."""
