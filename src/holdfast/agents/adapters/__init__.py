"""What lets other frameworks' models and agents work here. Each needs its extra; importing this package needs none."""
