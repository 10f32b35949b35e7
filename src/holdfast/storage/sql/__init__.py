"""Stores in SQL: the named statements, and the tables and reads over any database that runs them."""
