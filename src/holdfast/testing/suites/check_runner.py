"""Shared parts of the conformance suites: run a check, and name the broken rule if the check fails.

A suite is a tuple of checks. A check is an async function that tests one rule of a port; the rule is the check's
docstring or, without one, the check's name. A check is called with the subject under test, and raises `AssertionError`
if the subject breaks the rule.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from unittest import SkipTest

__all__ = ["LIMIT_S", "not_offered", "rule_of", "run_check"]

S = TypeVar("S")

LIMIT_S = 60.0
"""Timeout of one check, in seconds."""


def run_check(check: Callable[[S], Awaitable[None]], subject: S, *, port: str, limit_s: float = LIMIT_S) -> None:
    """Run one check on a new event loop. If the check fails, add a note with the rule to the error.

    Parameters:
        check: a check of a suite.
        subject: the subject under test, which is passed to the check.
        port: path of the file that documents the rules, for the note.
        limit_s: timeout, in seconds.

    Raises:
        AssertionError: if the subject breaks the rule.
        TimeoutError: if the check takes longer than ``limit_s``.
        unittest.SkipTest: if the subject lacks the feature under test.
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
    """Return the rule that a check tests, from the check's docstring or else from its name."""
    name = str(getattr(check, "__name__", check)).replace("_", " ")
    return " ".join((check.__doc__ or name).split()).removesuffix(".")


def not_offered(what: str) -> SkipTest:
    """Return the error that a check raises to be skipped if the subject lacks the feature under test."""
    return SkipTest(f"the subject does not support: {what}")
