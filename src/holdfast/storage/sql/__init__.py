"""Database-independent parts of the SQL stores: the named statements, and the code that reads and writes with them."""
