"""A callback waits for the exclusive calls of a run until all of them have really ended."""

from __future__ import annotations

from holdfast.agents.exclusive_calls import ExclusiveCalls


def test_a_callback_is_called_once_after_the_last_exclusive_call_has_ended() -> None:
    calls = ExclusiveCalls()
    called: list[str] = []
    calls.begin("r.1", "write")
    calls.begin("r.2", "move")
    calls.when_ended(lambda: called.append("ended"))
    assert list(calls.names) == ["write", "move"]
    calls.end("r.1")
    calls.end("r.1")
    assert (list(calls.names), called) == (["move"], [])
    calls.end("r.2")
    calls.end("r.3")
    assert (list(calls.names), called) == ([], ["ended"])


def test_a_callback_is_called_at_once_if_no_exclusive_call_is_open() -> None:
    called: list[str] = []
    ExclusiveCalls().when_ended(lambda: called.append("ended"))
    assert called == ["ended"]
