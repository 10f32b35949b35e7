"""The network of walled programs: a process of its own that connects them to allowed hosts, and to nothing else."""
