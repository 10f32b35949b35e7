"""Shared parts of the conformance suites: running a check, and naming the broken rule when it fails.

A suite is a tuple of async functions. Each tests one rule of a port; its name or docstring states the rule. It gets the
subject, and raises `AssertionError` with the problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from unittest import SkipTest

__all__ = ["LIMIT_S", "not_offered", "rule_of", "run_check"]

S = TypeVar("S")

LIMIT_S = 30.0
"""Timeout of one check, in seconds."""


def run_check(check: Callable[[S], Awaitable[None]], subject: S, *, port: str, limit_s: float = LIMIT_S) -> None:
    """Run one check on a new event loop. Its errors get a note with the rule.

    Parameters:
        check: a check of a suite.
        subject: the subject under test.
        port: place where the rules are documented, for the note.
        limit_s: timeout, in seconds.

    Raises:
        AssertionError: the subject breaks the rule.
        TimeoutError: the check did not end in time.
        unittest.SkipTest: the subject lacks the feature under test.
    """

    async def bounded() -> None:
        async with asyncio.timeout(limit_s):
            await check(subject)

    try:
        asyncio.run(bounded())
    except SkipTest:
        raise
    except Exception as error:
        late = f"; it had no answer after {limit_s:g} s" if isinstance(error, TimeoutError) else ""
        error.add_note(f"the rule that is broken: {rule_of(check)}{late} (the rules are in {port})")
        raise


def rule_of(check: Callable[..., object]) -> str:
    """Return the rule in words."""
    name = str(getattr(check, "__name__", check)).replace("_", " ")
    return " ".join((check.__doc__ or name).split()).removesuffix(".")


def not_offered(what: str) -> SkipTest:
    """Return the error to raise if the subject lacks the feature under test; test runners count it as skipped."""
    return SkipTest(f"the subject does not offer it: {what}")
