"""Shared parts of the conformance suites: running a check, and naming the broken rule when it fails.

A suite is a tuple of async functions. Each is one rule of a port, stated by its name, or better by its docstring where
it has one. It gets the subject, and raises `AssertionError` with the problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from unittest import SkipTest

__all__ = ["LIMIT_S", "not_offered", "rule_of", "run_check"]

S = TypeVar("S")

LIMIT_S = 30.0
"""How long one check may take."""


def run_check(check: Callable[[S], Awaitable[None]], subject: S, *, port: str, limit_s: float = LIMIT_S) -> None:
    """Run one check on an event loop of its own. Its errors get a note with the rule.

    Parameters:
        check: one of a suite.
        subject: what is checked.
        port: where the rules are written down, for the note.
        limit_s: how long it may take, in seconds.

    Raises:
        AssertionError: the subject does not keep the rule.
        TimeoutError: it did not answer.
        unittest.SkipTest: the subject does not have what the rule is about.
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
    """Return the error to raise where the subject lacks what a rule is about; test runners count it as skipped."""
    return SkipTest(f"the subject does not offer it: {what}")
