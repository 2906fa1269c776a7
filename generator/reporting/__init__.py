"""Output for people: tables, lines, the live display, and the HTML page."""
