"""The backend ``none``: programs run with all rights of the server's user. Used only if the operator names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from holdfast.tools.sandbox.port import Launch

if TYPE_CHECKING:
    from holdfast.tools.sandbox.plan import WallPlan

__all__ = ["UnwalledBackend"]


class UnwalledBackend:
    """Starts programs without a wall."""

    name = "none"
    layers: tuple[str, ...] = ()
    missing: Mapping[str, str] = MappingProxyType({})

    def probe(self) -> str | None:
        """Return None: every machine can run programs without a wall."""
        return None

    def launch(self, plan: WallPlan, argv: Sequence[str]) -> Launch:
        """Return how to start the program in the plan's folder, without a wall."""
        return Launch(argv=tuple(argv), environment=plan.environment, directory=plan.directory)
