"""The suite of channels passes for a real one to a folder, and each check finds a channel with a fault."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.channels import Channel
from holdfast.testing import CHANNEL_CHECKS, Network, run_channel_check
from holdfast.testing.suites import channel
from holdfast.testing.suites.channel import Copy
from tests.testing.suites.channel_faults import FAULTS, KeepsAThread, Marks, go_on
from tests.testing.suites.maildir_channel import MaildirChannel


class Folder:
    """A `Network` that is a folder."""

    addresses = ("ann", "bob")

    def __init__(self, root: Path, make: Callable[[Path], Channel] = MaildirChannel) -> None:
        self._root = root
        self._make = make
        self._written = 0
        for address in self.addresses:
            (root / address / "in" / "taken").mkdir(parents=True)
            (root / address / "out").mkdir()

    def channel(self) -> Channel:
        return self._make(self._root)

    async def write(self, address: str, content: str) -> str:
        self._written += 1
        new = self._root / address / f"{self._written:04}.new"
        new.write_text(content)
        new.rename(self._root / address / "in" / f"{self._written:04}.txt")
        return f"{address}/{self._written:04}.txt"

    async def copies(self, address: str) -> Sequence[Copy]:
        texts = [path.read_text() for path in sorted((self._root / address / "out").glob("*.txt"))]
        return [Copy(content=text.removeprefix("(again) "), repeat=text.startswith("(again) ")) for text in texts]

    @asynccontextmanager
    async def outage(self) -> AsyncIterator[None]:
        away = self._root.with_name("away")
        self._root.rename(away)
        yield
        away.rename(self._root)


def folders(root: Path, make: Callable[[Path], Channel] = MaildirChannel) -> Any:
    count = iter(range(100))

    @asynccontextmanager
    async def subject() -> AsyncIterator[Network]:
        yield Folder(root / str(next(count)) / "net", make)

    return subject


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [MaildirChannel, Marks], ids=["by ids", "by marks"])
def test_a_channel_to_a_folder_conforms(check: Any, make: Callable[[Path], Channel], tmp_path: Path) -> None:
    run_channel_check(check, folders(tmp_path, make))


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_the_check_finds_a_channel_with_the_fault(check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_PATIENCE_S", 0.5)
    with pytest.raises(AssertionError) as failed:
        run_channel_check(check, folders(tmp_path, FAULTS[check.__name__]))
    assert any("the rule that is broken" in note for note in failed.value.__notes__)


def test_a_thread_that_a_channel_keeps_is_found(tmp_path: Path) -> None:
    try:
        with pytest.raises(AssertionError, match="'of the channel' still runs"):
            run_channel_check(channel.a_closed_channel_leaves_nothing_behind, folders(tmp_path, KeepsAThread))
    finally:
        go_on.set()
