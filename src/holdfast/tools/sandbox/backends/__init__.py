"""Backends that build walls, each in its module; see `holdfast.tools.sandbox.port.SandboxBackend`."""
