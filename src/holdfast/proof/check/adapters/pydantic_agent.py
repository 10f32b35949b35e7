"""Pydantic AI: an agent with its OpenAI model. Pydantic AI has no sessions, so the adapter stores the messages."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.proof.check.kit import Setting

__all__ = ["PydanticAI"]


class PydanticAI:
    """Each run is an asyncio task around ``agent.run``; `cancel` cancels the task. The messages of completed runs are
    stored in memory."""

    packages = ("pydantic-ai-slim", "openai")

    async def start(self, setting: Setting) -> None:
        """See `Adapter.start`."""
        from openai import AsyncOpenAI
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        self._setting = setting
        self._tasks = setting.tasks()
        self._messages: dict[str, Any] = {}
        client = AsyncOpenAI(base_url=setting.model_url, api_key="any", max_retries=0)
        model = OpenAIChatModel("fake", provider=OpenAIProvider(openai_client=client))
        self._agent: Any = Agent(model, tools=list(setting.tools))

    async def open(self, session: str, user: str) -> None:
        """See `Adapter.open`."""
        self._messages.setdefault(session, [])

    async def submit(self, session: str, text: str) -> str:
        """See `Adapter.submit`."""

        async def run() -> str:
            end = await self._agent.run(text, message_history=self._messages[session], event_stream_handler=_streamed)
            self._messages[session] = end.all_messages()
            return str(end.output)

        return self._tasks.start(session, run())

    async def result(self, work: str) -> str:
        """See `Adapter.result`."""
        return await self._tasks.result(work)

    async def cancel(self, session: str) -> None:
        """See `Adapter.cancel`."""
        await self._tasks.cancel(session)

    async def transcript(self, session: str) -> list[list[str]]:
        """See `Adapter.transcript`."""
        raise self._setting.not_offered("it has no sessions: the caller keeps the messages")

    async def force(self) -> str:
        """See `Adapter.force`."""
        raise self._setting.not_offered("a sync tool runs in a thread, and nothing can end the thread")

    async def live(self) -> list[str]:
        """See `Adapter.live`."""
        raise self._setting.not_offered("it cannot list its runs")

    async def inbox(self) -> str:
        """See `Adapter.inbox`."""
        raise self._setting.not_offered("it has no inbox: the call that sends a message is the run")

    async def close(self) -> None:
        """See `Adapter.close`."""


async def _streamed(_: Any, events: AsyncIterable[Any]) -> None:
    """Do nothing: its presence makes the run stream from the model."""
    async for _event in events:
        pass
