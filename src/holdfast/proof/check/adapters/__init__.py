"""One adapter per file. The kit runs each adapter in its framework's environment; an adapter imports nothing but the
framework."""
