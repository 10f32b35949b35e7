"""A real channel to a folder: people's messages are files in it, and so are the answers.

    <root>/<address>/in/0001.txt          written by people; moved to in/taken/ once the host has it
    <root>/<address>/out/<stamp>.<id>.txt what the channel delivered; the id makes a repeat replace its file

Other networks push; a folder has to be looked at.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from holdfast.channels import Delivery, Incoming, Receive
from holdfast.errors import DeliveryFailed, HoldfastError
from holdfast.runtime import Scope

_LOOK_S = 0.005


class MaildirChannel:
    """A `Channel` to a folder."""

    name = "maildir"

    def __init__(self, root: Path) -> None:
        self._root = root

    @asynccontextmanager
    async def open(self, receive: Receive) -> AsyncIterator[None]:
        """See `Channel.open`."""
        async with Scope(f"channel {self.name}", grace_s=1.0) as scope:
            looking = scope.spawn(self._look(receive), name="look")
            try:
                yield
            finally:
                looking.interrupt.trigger("the channel closes")

    async def _look(self, receive: Receive) -> None:
        while True:
            for address in self._addresses():
                await self._take(address, receive)
            await asyncio.sleep(_LOOK_S)

    def _addresses(self) -> list[str]:
        try:
            return sorted(path.name for path in self._root.iterdir())
        except OSError:  # the network is away; it is looked for again
            return []

    async def _take(self, address: str, receive: Receive) -> None:
        folder = self._root / address / "in"
        for path in sorted(folder.glob("*.txt")):
            incoming = Incoming(address=address, incoming_id=f"{address}/{path.name}", content=path.read_text())
            try:
                await receive(incoming)
            except (HoldfastError, OSError):
                return  # not taken: it stays where it is, and what came after it waits
            path.rename(folder / "taken" / path.name)

    async def deliver(self, delivery: Delivery) -> None:
        """See `Channel.deliver`."""
        if not self._root.is_dir():
            raise DeliveryFailed("the folder is not there", retry_after_s=1.0)
        out = self._root / delivery.address / "out"
        if not out.is_dir():
            raise DeliveryFailed(f"there is no address {delivery.address!r}")
        known = next(out.glob(f"*.{delivery.delivery_id}.txt"), None)
        if known is not None:
            return
        stamp = len(list(out.glob("*.txt")))
        new = out / f"{delivery.delivery_id}.new"
        new.write_text(delivery.content)
        os.replace(new, out / f"{stamp:06}.{delivery.delivery_id}.txt")
