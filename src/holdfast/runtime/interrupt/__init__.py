"""Interrupts: their delivery, the context that carries them, and protection from them."""
