"""Walls around programs on Linux: namespaces, Landlock, a system call filter and limits, built in the forked child."""
