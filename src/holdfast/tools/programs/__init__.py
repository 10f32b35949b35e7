"""Tools that run programs: terminal, background processes and Python scripts."""
