"""OpenAI Agents: streamed runs with the SDK's Chat Completions model and SQLite session."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.proof.check.kit import Setting

__all__ = ["OpenAIAgents"]


class OpenAIAgents:
    """Each run reads a ``Runner.run_streamed`` stream to its end; `cancel` calls ``cancel()`` on the run's result."""

    packages = ("openai-agents", "openai")

    async def start(self, setting: Setting) -> None:
        """See `Adapter.start`."""
        from agents import Agent, OpenAIChatCompletionsModel, function_tool, set_tracing_disabled
        from openai import AsyncOpenAI

        set_tracing_disabled(True)
        self._setting = setting
        self._tasks = setting.tasks()
        self._runs: dict[str, list[Any]] = {}
        self._sessions: dict[str, Any] = {}
        client = AsyncOpenAI(base_url=setting.model_url, api_key="any", max_retries=0)
        model = OpenAIChatCompletionsModel(model="fake", openai_client=client)
        self._agent = Agent(name="probe", model=model, tools=[function_tool(tool) for tool in setting.tools])

    async def open(self, session: str, user: str) -> None:
        """See `Adapter.open`."""
        from agents import SQLiteSession

        self._sessions[session] = SQLiteSession(session, str(Path(self._setting.folder) / "agents.db"))

    async def submit(self, session: str, text: str) -> str:
        """See `Adapter.submit`."""
        from agents import Runner

        running = self._runs.setdefault(session, [])

        async def run() -> str:
            streamed = Runner.run_streamed(self._agent, text, session=self._sessions[session])
            running.append(streamed)
            try:
                async for _ in streamed.stream_events():
                    pass
            finally:
                running[:] = [one for one in running if one is not streamed]
            if streamed.final_output is None:
                raise RuntimeError("the run ended without an answer")
            return str(streamed.final_output)

        return self._tasks.start(session, run())

    async def result(self, work: str) -> str:
        """See `Adapter.result`."""
        return await self._tasks.result(work)

    async def cancel(self, session: str) -> None:
        """See `Adapter.cancel`."""
        for streamed in list(self._runs.get(session, ())):
            streamed.cancel()
        await self._tasks.ended(session)

    async def transcript(self, session: str) -> list[list[str]]:
        """See `Adapter.transcript`."""
        items = await self._sessions[session].get_items()
        return [[str(item.get("role", "tool")), _text(item.get("content"))] for item in items]

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
        for session in self._sessions.values():
            session.close()


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content)
    return str(content or "")
