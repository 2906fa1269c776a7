"""The families, a folder each, and what they share, a module each."""
