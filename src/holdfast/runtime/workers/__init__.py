"""Python processes for isolated functions: the pool, and the program that each process runs."""
