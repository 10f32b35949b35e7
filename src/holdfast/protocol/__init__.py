"""Pure values and machines: no I/O, no clock, no threads, no asyncio."""
