"""One adapter a file. Each is run by the kit in its framework's environment, and imports nothing but the framework."""
