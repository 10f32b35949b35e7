"""Where sessions, messages, runs and events are kept: the port and its stores."""
