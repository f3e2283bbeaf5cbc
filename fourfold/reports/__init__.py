"""Turn records into HTML pages, charts, and terminal tables. Nothing is computed here."""
