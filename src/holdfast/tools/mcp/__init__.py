"""Tools of MCP servers, over HTTP or a program's pipes."""
