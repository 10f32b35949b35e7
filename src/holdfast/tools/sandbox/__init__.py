"""Confinement of programs: environment, namespaces, limits and denied system calls."""
