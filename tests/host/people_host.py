"""A host on a SQLite file whose run asks people twice and is answered: the program that the restart tests kill.

Usage: python -m tests.host.people_host <database> <agent>
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast import Host, Run, agent
from holdfast.host.session import Session

QUESTIONS = ("shall I?", "sure?")


def agents(effects: Path) -> list[object]:
    """The agents, which write each effect into a file."""

    async def effect(name: str) -> str:
        with effects.open("a") as file:
            file.write(f"{name}\n")
        return name

    async def asked(run: Run) -> str:
        await run.emit("before ")
        await run.call(effect, "first")
        one = await run.ask_user(QUESTIONS[0])
        await run.call(effect, "second")
        two = await run.ask_user(QUESTIONS[1])
        return f"{one.text} {two.text}"

    @agent(replayable=True)
    async def patient(run: Run) -> str:
        return await asked(run)

    @agent
    async def present(run: Run) -> str:
        return await asked(run)

    @agent
    async def echo(run: Run) -> str:
        return run.text

    return [patient, present, echo]


async def answer_until_settled(session: Session, message_id: str) -> None:
    """Answer what is asked, after giving the run the time to leave the memory."""
    while (await session.message(message_id)).state == "taken":
        await asyncio.sleep(0.05)
        for question in await session.questions():
            await session.answer(question.question_id, f"yes to {question.text}")


async def main(database: str, name: str) -> None:
    """Send, answer, end."""
    path = Path(database)
    async with Host(agents=agents(path.with_suffix(".effects")), store=f"sqlite:///{path}") as host:  # type: ignore[arg-type]
        session = host.session("s")
        receipt = await session.send("x", agent=name)
        path.with_suffix(".sent").write_text(receipt.message_id)
        await answer_until_settled(session, receipt.message_id)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
