"""A debate and a vote, built from composite agents: all speakers argue in parallel, twice, then a jury votes."""

import asyncio
from collections import Counter
from collections.abc import Sequence

import holdfast
from holdfast.agents import BranchResult
from holdfast.events import ChildFinished


def speaker(name: str, view: str) -> holdfast.Agent:
    """Return an agent that argues for a view.

    With a model: Agent(name=…, model=…, instructions=f"Argue for {view}").
    """

    async def argue(run: holdfast.Run) -> str:
        heard = run.text.count("argues")
        return f"{name} argues for {view}" + (f", having heard {heard}" if heard else "")

    return holdfast.agent(name=name, replayable=True)(argue)


def juror(favours: str) -> holdfast.Agent:
    """Return an agent that votes."""

    async def vote(run: holdfast.Run) -> str:
        return favours

    return holdfast.agent(name="juror", replayable=True)(vote)


def majority(votes: Sequence[BranchResult]) -> str:
    (winner, count), *_ = Counter(vote.text for vote in votes).most_common()
    return f"{winner} wins with {count} of {len(votes)} votes"


speakers = [speaker("Ann", "tea"), speaker("Bob", "coffee")]
a_round = holdfast.parallel(*speakers, name="round")
jury = holdfast.parallel(*map(juror, ["tea", "coffee", "tea"]), join=majority, need="some", name="jury")
debate = holdfast.sequence(a_round, a_round, jury, name="debate")


async def main() -> None:
    async with holdfast.Host(debate, store="memory://") as host:
        session = host.session("alice")
        receipt = await session.send("tea or coffee?")
        async for event in session.events(after=receipt.cursor, follow=receipt.message_id):
            if isinstance(event, ChildFinished) and event.run_id == receipt.run_id:
                print(event.text)


if __name__ == "__main__":
    asyncio.run(main())
