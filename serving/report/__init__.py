"""Results as HTML, Markdown, CSV and on the terminal."""
