"""Bounded, fair and broadcast queues, and the wait queue below them."""
