"""Adoption of tasks, threads and programs that foreign code starts in a scope."""
