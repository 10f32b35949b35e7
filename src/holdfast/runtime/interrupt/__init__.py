"""Interrupts: their delivery, the context variables that carry them, and shields against them."""
