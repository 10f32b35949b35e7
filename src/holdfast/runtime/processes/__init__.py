"""Process trees: ``/proc``, tags, the zygote that forks reapers, and the kill of a whole tree."""
