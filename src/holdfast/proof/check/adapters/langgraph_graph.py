"""LangGraph as a library: the prebuilt tool-calling agent, LangChain's OpenAI model, and the SQLite checkpointer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.proof.check.kit import Setting

__all__ = ["LangGraph"]


class LangGraph:
    """Each session is a LangGraph thread. Each run is an asyncio task around ``ainvoke``; `cancel` cancels the task."""

    packages = ("langgraph", "langgraph-checkpoint-sqlite", "langchain-openai")

    async def start(self, setting: Setting) -> None:
        """See `Adapter.start`."""
        from langchain_openai import ChatOpenAI
        from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
        from langgraph.prebuilt import create_react_agent

        self._setting = setting
        self._tasks = setting.tasks()
        self._saving = AsyncSqliteSaver.from_conn_string(str(Path(setting.folder) / "langgraph.db"))
        model = ChatOpenAI(model="fake", base_url=setting.model_url, api_key="any", streaming=True, max_retries=0)
        saver = await self._saving.__aenter__()
        self._graph = create_react_agent(model, list(setting.tools), checkpointer=saver)

    def _thread(self, session: str) -> Any:
        return {"configurable": {"thread_id": session}}

    async def open(self, session: str, user: str) -> None:
        """See `Adapter.open`. Does nothing, because the session's first run creates the LangGraph thread."""

    async def submit(self, session: str, text: str) -> str:
        """See `Adapter.submit`."""

        async def run() -> str:
            end = await self._graph.ainvoke({"messages": [("user", text)]}, self._thread(session))
            return str(end["messages"][-1].content)

        return self._tasks.start(session, run())

    async def result(self, work: str) -> str:
        """See `Adapter.result`."""
        return await self._tasks.result(work)

    async def cancel(self, session: str) -> None:
        """See `Adapter.cancel`."""
        await self._tasks.cancel(session)

    async def transcript(self, session: str) -> list[list[str]]:
        """See `Adapter.transcript`."""
        state = await self._graph.aget_state(self._thread(session))
        roles = {"human": "user", "ai": "assistant"}
        return [[roles.get(one.type, one.type), str(one.content)] for one in state.values.get("messages", ())]

    async def force(self) -> str:
        """See `Adapter.force`."""
        raise self._setting.not_offered("a sync tool runs in a thread, and nothing can end the thread")

    async def live(self) -> list[str]:
        """See `Adapter.live`."""
        raise self._setting.not_offered("the library cannot list its runs")

    async def inbox(self) -> str:
        """See `Adapter.inbox`."""
        raise self._setting.not_offered("the library has no inbox for messages; LangGraph's server has one")

    async def close(self) -> None:
        """See `Adapter.close`."""
        await self._saving.__aexit__(None, None, None)
