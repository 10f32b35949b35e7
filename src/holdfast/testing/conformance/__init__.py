"""The promises that make sense for any agent runtime, tried against an adapter of a few functions."""
