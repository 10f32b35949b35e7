"""Programs that cannot be started, and what is left of the attempt."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.runtime.process_host import ProcessHost
from holdfast.runtime.scope.scope import Scope

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="process trees need Linux")


@pytest.fixture
def processes() -> Iterator[ProcessHost]:
    host = ProcessHost()
    host.start()
    yield host
    host.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until_nothing_is_left(processes: ProcessHost, before: int) -> None:
    """Wait for the end of all trees, and until no more descriptors are open than before."""
    while processes.statistics().live or processes.statistics().reapers or descriptors() > before:
        await asyncio.sleep(0.005)


def test_a_program_that_could_not_even_be_asked_for_leaves_nothing(processes: ProcessHost) -> None:
    async def main() -> None:
        async with Scope("tool", processes=processes) as scope:
            before = descriptors()
            for start in range(3):
                with pytest.raises(OSError, match="Bad file descriptor"):
                    await scope.process(["true"], stdin=999 + start)
            await until_nothing_is_left(processes, before)
            assert scope.statistics().processes == 0

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_start_that_is_given_up_before_the_zygote_took_it_leaves_nothing(
    processes: ProcessHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with Scope("tool", processes=processes) as scope:
            before = descriptors()
            assert processes._zygote is not None
            with monkeypatch.context() as patch:
                patch.setattr(processes._zygote, "submit", lambda *_, **__: False)
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await scope.process(["true"], stdin=-1)
            await until_nothing_is_left(processes, before)

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize(
    ("argv", "options"),
    [([], {}), ([""], {}), ("ls", {}), ("", {}), (["true"], {"env": {"A=B": "c"}}), (["a\0b"], {})],
    ids=["nothing", "no name", "text", "no text", "environment", "nul"],
)
def test_what_is_no_program_is_refused_in_the_caller(processes: ProcessHost, argv: Any, options: Any) -> None:
    async def main() -> None:
        async with Scope("tool", processes=processes) as scope:
            with pytest.raises(ValueError, match=r"argv|NUL|="):
                await scope.process(argv, **options)
            assert scope.statistics().processes == 0

    asyncio.run(asyncio.wait_for(main(), 60))
