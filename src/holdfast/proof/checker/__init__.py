"""The rules of the history checker, promise by promise."""
