"""Bounded, fair and broadcast queues, and the wait queue that they share."""
