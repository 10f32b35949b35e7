"""Google ADK: an LLM agent with ADK's LiteLLM model, runner, and database session service on SQLite."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.proof.check.kit import Setting

__all__ = ["GoogleADK"]

_APP = "probe"


class GoogleADK:
    """Each run is an asyncio task that reads ``runner.run_async`` in SSE mode; `cancel` cancels the task."""

    packages = ("google-adk", "litellm")

    async def start(self, setting: Setting) -> None:
        """See `Adapter.start`."""
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch a list of prices from the network
        from google.adk.agents import LlmAgent
        from google.adk.models.lite_llm import LiteLlm
        from google.adk.runners import Runner
        from google.adk.sessions import DatabaseSessionService

        self._setting = setting
        self._tasks = setting.tasks()
        self._users: dict[str, str] = {}
        self._service = DatabaseSessionService(f"sqlite+aiosqlite:///{Path(setting.folder) / 'adk.db'}")
        model = LiteLlm(model="openai/fake", api_base=setting.model_url, api_key="any", num_retries=0)
        agent = LlmAgent(name="probe", model=model, tools=list(setting.tools))
        self._runner = Runner(agent=agent, app_name=_APP, session_service=self._service)

    async def open(self, session: str, user: str) -> None:
        """See `Adapter.open`."""
        self._users[session] = user
        if await self._session(session) is None:
            await self._service.create_session(app_name=_APP, user_id=user, session_id=session)

    async def _session(self, session: str) -> Any:
        return await self._service.get_session(app_name=_APP, user_id=self._users[session], session_id=session)

    async def submit(self, session: str, text: str) -> str:
        """See `Adapter.submit`."""
        from google.adk.agents.run_config import RunConfig, StreamingMode
        from google.genai.types import Content, Part

        async def run() -> str:
            said = ""
            async for event in self._runner.run_async(
                user_id=self._users[session],
                session_id=session,
                new_message=Content(role="user", parts=[Part(text=text)]),
                run_config=RunConfig(streaming_mode=StreamingMode.SSE),
            ):
                if event.is_final_response() and not event.partial:
                    said = _text(event)
                if event.error_message:
                    raise RuntimeError(event.error_message)
            return said

        return self._tasks.start(session, run())

    async def result(self, work: str) -> str:
        """See `Adapter.result`."""
        return await self._tasks.result(work)

    async def cancel(self, session: str) -> None:
        """See `Adapter.cancel`."""
        await self._tasks.cancel(session)

    async def transcript(self, session: str) -> list[list[str]]:
        """See `Adapter.transcript`."""
        kept = await self._session(session)
        return [["user" if event.author == "user" else "assistant", _text(event)] for event in kept.events]

    async def force(self) -> str:
        """See `Adapter.force`."""
        raise self._setting.not_offered("a sync tool runs on the run's event loop, and nothing can end it")

    async def live(self) -> list[str]:
        """See `Adapter.live`."""
        raise self._setting.not_offered("it cannot list its runs")

    async def inbox(self) -> str:
        """See `Adapter.inbox`."""
        raise self._setting.not_offered("it has no inbox: the call that sends a message is the run")

    async def close(self) -> None:
        """See `Adapter.close`."""
        await self._runner.close()


def _text(event: Any) -> str:
    parts = event.content.parts if event.content else None
    return "".join(part.text or "" for part in parts or ())
