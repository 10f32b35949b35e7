"""Stops at the same time share their kills, and each gets a look of its own from its beginning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from holdfast import Host, Run
from holdfast.runtime.adoption.kill_passes import KillPasses
from holdfast.runtime.oneshot import Oneshot
from holdfast.runtime.process_host import ProcessHost
from holdfast.runtime.processes import procfs
from holdfast.runtime.processes.seal import Seal
from holdfast.runtime.processes.tree import TreeResult

Done = dict[int, tuple[list[int], list[int]]]


class Pass:
    """One look at all processes, as the test lets it go."""

    def __init__(self, tags: Mapping[int, Any], told: Callable[[Done | None], object]) -> None:
        self.tags = set(tags)
        self.tell = told

    def submit(self) -> bool:
        return True


class Zygote:
    """Notes the passes that are asked for; ``refusing``: it has no descriptor to be asked with."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []
        self.refusing = False

    def new_killer(self, carrier: Any, sealed: Any, tags: Mapping[int, Any], bound_s: float, told: Any) -> Pass:
        if self.refusing:
            raise OSError("too many open files")
        self.passes.append(Pass(tags, told))
        return self.passes[-1]


@pytest.fixture
def zygote() -> Zygote:
    return Zygote()


@pytest.fixture
def kills(zygote: Zygote) -> KillPasses:
    seal = Seal(10, 0, sealed=True, gave_up_privileges=False)
    return KillPasses(cast(ProcessHost, zygote), seal, lambda: None, lambda tags: None)


GONE = TreeResult(killed=(100,))


def test_a_stop_is_never_answered_by_a_look_that_began_before_it(kills: KillPasses, zygote: Zygote) -> None:
    """What the scope started since that look has passed would be called gone."""
    first = kills.ask({1: []}, 2.0)
    second = kills.ask({1: []}, 2.0)
    assert [one.tags for one in zygote.passes] == [{1}]
    zygote.passes[0].tell({1: ([100], [])})
    assert (first.value, second.value) == (GONE, None)
    assert [one.tags for one in zygote.passes] == [{1}, {1}]
    zygote.passes[1].tell({1: ([101], [])})
    assert second.value == TreeResult(killed=(101,))


def test_all_who_ask_during_a_look_share_the_next_one(kills: KillPasses, zygote: Zygote) -> None:
    asked = [kills.ask({tag: []}, 2.0) for tag in range(1, 101)]
    assert len(zygote.passes) == 1
    zygote.passes[0].tell({})
    assert [len(one.tags) for one in zygote.passes] == [1, 99]
    zygote.passes[1].tell({tag: ([], []) for tag in range(2, 101)})
    assert all(one.value == TreeResult() for one in asked[1:])
    assert asked[0].value is None, "its processes are not dead yet"
    zygote.passes[0].tell({1: ([100], [])})
    assert asked[0].value == GONE


def test_a_scope_that_does_not_die_keeps_nobody_waiting(kills: KillPasses, zygote: Zygote) -> None:
    kills.ask({9: []}, 2.0)
    slow, quick = kills.ask({1: []}, 2.0), kills.ask({2: []}, 2.0)
    zygote.passes[0].tell({})
    zygote.passes[1].tell({2: ([100], [])})
    assert (slow.value, quick.value) == (None, GONE)
    zygote.passes[1].tell({1: ([7], [8])})
    assert slow.value == TreeResult(killed=(7,), survivors=(8,), proven=False)


def test_a_pass_that_ends_without_a_word_proves_nothing(kills: KillPasses, zygote: Zygote) -> None:
    first, waiting = kills.ask({1: [], 2: []}, 2.0), kills.ask({3: []}, 2.0)
    zygote.passes[0].tell({1: ([100], [])})
    assert first.value is None
    zygote.passes[0].tell(None)
    assert first.value == TreeResult(killed=(100,), proven=False)
    zygote.passes[1].tell(None)
    assert waiting.value == TreeResult(proven=False)


def test_where_nobody_can_be_asked_nothing_is_proven_and_the_next_is_asked_again(
    kills: KillPasses, zygote: Zygote
) -> None:
    zygote.refusing = True
    assert kills.ask({1: []}, 2.0).value == TreeResult(proven=False)
    zygote.refusing = False
    asked = kills.ask({1: []}, 2.0)
    zygote.passes[0].tell({1: ([100], [])})
    assert asked.value == GONE


@pytest.mark.skipif(not procfs.supported(), reason="programs of foreign code are adopted only on Linux")
def test_gone_is_said_after_a_look_though_all_that_was_seen_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it started may live on where nobody has seen it."""
    looks: list[set[int]] = []
    ask = KillPasses.ask

    def noted(self: KillPasses, tags: Mapping[int, Any], bound_s: float) -> Oneshot[TreeResult]:
        looks.append(set(tags))
        return ask(self, tags, bound_s)

    monkeypatch.setattr(KillPasses, "ask", noted)

    async def shell(run: Run) -> None:
        await (await asyncio.create_subprocess_exec("true")).wait()
        await run.emit("done")
        await run.interrupt.wait()

    async def main() -> None:
        async with asyncio.timeout(30), Host(shell, store="memory://") as host:
            session = host.session("s")
            receipt = await session.send("x")
            async for event in session.events(after=receipt.cursor):
                if event.kind == "text.delta":
                    break
            stopped = await session.interrupt()
            assert (stopped.outcome, stopped.forced) == ("gone", ())
            assert len(looks) == 1

    asyncio.run(main())
