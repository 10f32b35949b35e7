"""Tools for web pages: fetch as text, and a real browser."""
