"""Functions in processes of their own that end badly."""

from __future__ import annotations

import _thread
import asyncio
import sys

import pytest

from holdfast.errors import ProcessEnded
from holdfast.runtime.scope.scope import Scope


@pytest.mark.parametrize(
    ("fn", "values"), [(sys.exit, (3,)), (sys.exit, ("text",)), (_thread.interrupt_main, ())], ids=repr
)
def test_a_function_that_ends_its_process_does_not_end_ours(fn: object, values: tuple[object, ...]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            async with Scope("tool") as scope:
                handle = scope.spawn(fn, *values, on="process")  # type: ignore[call-overload]
                with pytest.raises(ProcessEnded, match="exit code"):
                    await handle
                raise ValueError("the body goes on")

    with pytest.raises(BaseExceptionGroup) as caught:
        asyncio.run(main())
    assert {type(error) for error in caught.value.exceptions} == {ProcessEnded, ValueError}
