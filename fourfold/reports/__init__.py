"""HTML pages, charts and terminal tables made from records; nothing is computed here."""
