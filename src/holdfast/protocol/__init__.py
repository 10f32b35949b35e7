"""Pure values and state machines, without I/O, clocks, threads or asyncio."""
