"""Adapters, one per file. The kit runs each adapter in its framework's environment. Apart from the standard library
and the kit, an adapter imports only its framework."""
