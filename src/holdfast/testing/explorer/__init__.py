"""The explorer: an event loop that runs one test under many schedules, with its threads, clocks and replays."""
