"""Adoption of what foreign code starts in a scope: tasks, threads and programs."""
