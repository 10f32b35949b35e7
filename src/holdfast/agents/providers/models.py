"""Models of all providers that pydantic-ai supports (extra ``models``).

One request is one HTTP request: the SDKs' own retries are disabled, since a retry after an interrupt would be billed.
Leaving the block of `PydanticModel.stream`, or cancelling the task that waits in the block, closes the connection, even
if the provider has not sent any headers yet.

Connections are reused between requests only inside `PydanticModel.lifespan`, which a host enters. Otherwise, each
request opens and closes its own connection.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from holdfast.agents.tool import Tool, Toolset, ToolsetContext
from holdfast.errors import ConfigurationError, MissingExtra, ModelFailed, UnknownAttachment, format_error
from holdfast.logs import redact
from holdfast.protocol.messages import Usage
from holdfast.protocol.model import EndPart, ModelRequest, Part, ReasoningPart, TextPart, UserMessage

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelResponse
    from pydantic_ai.models import Model as ProviderModel
    from pydantic_ai.models import StreamedResponse
    from pydantic_ai.settings import ModelSettings

__all__ = ["PydanticModel", "pydantic_model"]

BACK_S = 0.5
"""Default retry delay after a failure, in seconds."""

_VARIABLE = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b")
_GROUP = re.compile(r"pydantic-ai-slim\[([a-z-]+)\]")
Reason = Literal["stop", "length", "calls", "refused", "other"]

_REASONS: Mapping[str, Reason] = {
    "stop": "stop",
    "length": "length",
    "tool_call": "calls",
    "content_filter": "refused",
}


def pydantic_model(name: str) -> PydanticModel:
    """Return the model ``provider:model``, with the key and address from the provider's usual environment variables.

    ``openai:…`` uses OpenAI's Responses API. If ``OPENAI_BASE_URL`` points to another server, ``openai:…`` uses Chat
    Completions, because that server may not support the Responses API. ``openai-chat:…`` and ``openai-responses:…``
    choose the API explicitly.

    Raises:
        ConfigurationError: if the provider is unknown or its key is missing.
        MissingExtra: if pydantic-ai is not installed.
    """
    return PydanticModel(name)


class PydanticModel(Toolset):
    """A provider's model. Any number of runs may share it, even on several event loops.

    The model is a `Toolset` without tools, so that a host enters the model's lifespan.

    Parameters:
        name: ``provider:model``.

    Raises:
        ConfigurationError: if the provider is unknown or its key is missing.
        MissingExtra: if pydantic-ai is not installed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._spelled = _spelled(name)
        self._of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, ProviderModel] = WeakKeyDictionary()
        self._spare = [_build(name, self._spelled)]
        """The model that was built to validate the name; the first loop uses it."""
        self._context_tokens = self._spare[0].context_window

    @property
    def name(self) -> str:
        """The model's name as given, such as ``openai:gpt-5``."""
        return self._name

    @property
    def context_tokens(self) -> int | None:
        """The size of the context window, in tokens; None if unknown."""
        return self._context_tokens

    def tools(self) -> Sequence[Tool]:
        """Return no tools."""
        return ()

    @asynccontextmanager
    async def lifespan(self, home: ToolsetContext | None = None) -> AsyncGenerator[None]:
        """Reuse connections between the requests of this event loop; leaving the block closes them."""
        async with self._model():
            yield

    @asynccontextmanager
    async def stream(
        self, request: ModelRequest, *, attachment: Callable[[str], Awaitable[bytes]] | None = None
    ) -> AsyncGenerator[AsyncIterator[Part]]:
        """Open one request. See `Model.stream`.

        Parameters:
            attachment: async function that is called with an attachment's digest and returns the attachment's bytes.
                If None, the request only names its attachments.
        """
        model = self._model()
        files = {} if attachment is None else await _load(request, attachment)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(model)
            try:
                stream = await self._open(stack, model, request, files)
            except Exception as error:
                raise self._failure(error) from error
            parts = await stack.enter_async_context(aclosing(self._parts(stream)))
            yield parts

    def _model(self) -> ProviderModel:
        loop = asyncio.get_running_loop()
        found = self._of_loop.get(loop)
        if found is None:
            try:
                found = self._spare.pop()
            except IndexError:
                found = _build(self._name, self._spelled)
            self._of_loop[loop] = found
        return found

    async def _open(
        self, stack: AsyncExitStack, model: ProviderModel, request: ModelRequest, files: Mapping[str, _File]
    ) -> StreamedResponse:
        """Send the request. If building the request fails, retry with only the images, then without files.

        A file that is left out is described in text, so that a rejected file does not break the session.
        """
        from httpx2 import StreamError, TransportError
        from pydantic_ai.exceptions import AgentRunError

        images = {digest: file for digest, file in files.items() if file.media_type.startswith("image/")}
        attempts = [files, *([images] if 0 < len(images) < len(files) else []), *([{}] if files else [])]
        for n, tried in enumerate(attempts, 1):
            try:
                contents = {digest: file.content for digest, file in tried.items()}
                return await stack.enter_async_context(_request(model, request, contents))
            except (AgentRunError, TransportError, StreamError):
                raise  # the request was sent
            except Exception:
                if n == len(attempts):
                    raise
        raise AssertionError("unreachable: the attempts are never empty")

    async def _parts(self, stream: StreamedResponse) -> AsyncGenerator[Part]:
        from pydantic_ai import messages as theirs

        from holdfast.agents.providers.messages import calls_of

        ended = False
        try:
            async for event in stream:
                match event:
                    case theirs.PartStartEvent(part=theirs.TextPart(content=text)) if text:
                        yield TextPart(text=text)
                    case theirs.PartStartEvent(part=theirs.ThinkingPart(content=text)) if text:
                        yield ReasoningPart(text=text)
                    case theirs.PartDeltaEvent(delta=theirs.TextPartDelta(content_delta=text)) if text:
                        yield TextPart(text=text)
                    case theirs.PartDeltaEvent(delta=theirs.ThinkingPartDelta(content_delta=text)) if text:
                        yield ReasoningPart(text=text)
            response = stream.get()
            self._check_whole(stream, response)
            ended = True
        except Exception as error:
            raise self._failure(error) from error
        finally:
            if not ended:
                with suppress(Exception):  # the original error matters more than a failed close
                    await stream.cancel()
        calls = calls_of(response)
        for call in calls:
            yield call
        yield _end(response, asks=bool(calls))

    def _check_whole(self, stream: StreamedResponse, response: ModelResponse) -> None:
        """Raise `ModelFailed` for an incomplete answer: a stream may stop in the middle of text or arguments."""
        details = response.provider_details or {}
        unsaid = "finish_reason" not in details and "refusal" not in details and _must_say(stream)
        if response.state != "complete" or unsaid:
            raise ModelFailed(f"{self._name} stopped in the middle of its answer", retry_after_s=BACK_S)

    # ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _failure(self, error: Exception) -> ModelFailed:
        from httpx2 import StreamError, TransportError
        from pydantic_ai import exceptions as theirs

        if isinstance(error, ModelFailed):
            return error
        if isinstance(error, theirs.ModelHTTPError):
            return self._refusal(error)
        if isinstance(error, theirs.ModelConnectionError | TransportError | StreamError):
            text = _plain(format_error(error.__cause__ or error))
            return ModelFailed(
                f"the connection to {self._name} failed: {text}",
                hint="check the network and the provider's address",
                retry_after_s=BACK_S,
            )
        if isinstance(error, theirs.ModelAPIError):
            text, after = _plain(str(error)), error.retry_after
            return ModelFailed(f"{self._name} failed: {text}", retry_after_s=BACK_S if after is None else after)
        if isinstance(error, theirs.UserError | NotImplementedError):
            return ModelFailed(f"{self._name} does not support this request: {_plain(str(error))}")
        return ModelFailed(
            f"{self._name} sent an invalid response: {_plain(format_error(error))}",
            hint="check that the server at the provider's address supports this protocol",
            retry_after_s=BACK_S,
        )

    def _refusal(self, error: Any) -> ModelFailed:
        from pydantic_ai import exceptions as theirs

        status: int = error.status_code
        after: float | None = error.retry_after
        hint = ""
        retry_after_s: float | None = None
        if isinstance(error, theirs.ModelAuthenticationError) or status in (401, 403):
            hint = f"set {_variable_of(self._spelled)} to a valid key for the provider, and restart"
        elif isinstance(error, theirs.ModelNotFoundError) or status == 404:
            near = f"; did you mean {error.suggested_model_id!r}?" if error.suggested_model_id else ""
            hint = f"check the model's name and the provider's address{near}"
        elif isinstance(error, theirs.ModelQuotaExceededError):
            hint = "the account has no credit left; check the provider's billing page"
        elif isinstance(error, theirs.ModelContextWindowExceededError):
            hint = "the conversation is too long for this model; compact it"
        elif status in (408, 409, 425, 429) or status >= 500:
            retry_after_s = BACK_S if after is None else after
            hint = (
                f"the provider asks to wait {after:g} s"
                if after is not None
                else "the provider reported a temporary failure; retry later"
            )
        return ModelFailed(
            f"{self._name} answered with status {status}: {_message_of(error)}",
            hint=hint,
            provider_status=status,
            retry_after_s=retry_after_s,
        )


def _spelled(name: str) -> str:
    """Return the model's name as pydantic-ai spells it."""
    provider, _, model = name.partition(":")
    address = os.environ.get("OPENAI_BASE_URL")
    if provider == "openai" and address and not (urlsplit(address).hostname or "").endswith("openai.com"):
        return f"openai-chat:{model}"
    return name


def _build(name: str, spelled: str) -> ProviderModel:
    """Build a model with its own client. Raises the errors of `pydantic_model`."""
    provider = name.partition(":")[0]
    try:
        from pydantic_ai.exceptions import UserError
        from pydantic_ai.models import infer_model
    except ImportError:
        raise MissingExtra(f"the model {name}", extra="models") from None
    try:
        return infer_model(spelled)
    except ImportError as error:
        group = _GROUP.search(str(error))
        if group is not None and group[1] in ("openai", "anthropic"):
            raise MissingExtra(f"the model {name}", extra="models") from error
        raise ConfigurationError(
            f"the model {name} needs packages that are not installed",
            hint=f"install them: pip install 'pydantic-ai-slim[{group[1] if group else provider}]'",
        ) from error
    except UserError as error:
        text = str(error)
        if text.startswith("Unknown model"):
            raise ConfigurationError(
                f"unknown model {name!r}: {provider!r} is not a provider",
                hint="use provider:model, such as openai:gpt-5, anthropic:claude-sonnet-5 or ollama:llama3",
            ) from None
        variables = list(dict.fromkeys(_VARIABLE.findall(text)))
        raise ConfigurationError(
            f"the model {name} needs a provider setting that is missing",
            hint=f"set {' or '.join(variables)} in the environment" if variables else text,
        ) from None
    except Exception as error:
        raise ConfigurationError(
            f"setting up the model {name} failed: {_plain(format_error(error))}",
            hint="check the provider's environment variables",
        ) from error


def _request(model: ProviderModel, request: ModelRequest, files: Mapping[str, bytes]) -> Any:
    from pydantic_ai.direct import model_request_stream
    from pydantic_ai.models import ModelRequestParameters
    from pydantic_ai.tools import ToolDefinition

    from holdfast.agents.providers.messages import to_provider

    settings = cast("ModelSettings", dict(request.settings))
    if "max_retries" not in model.unsupported_settings:
        settings["max_retries"] = 0
    tools = [
        ToolDefinition(name=tool.name, description=tool.description, parameters_json_schema=tool.parameters)
        for tool in request.tools
    ]
    return model_request_stream(
        model,
        to_provider(request, files),
        model_settings=settings,
        model_request_parameters=ModelRequestParameters(function_tools=tools),
    )


class _File(NamedTuple):
    media_type: str
    content: bytes


async def _load(request: ModelRequest, attachment: Callable[[str], Awaitable[bytes]]) -> dict[str, _File]:
    """Return the files of a request by digest, except deleted ones."""
    files: dict[str, _File] = {}
    for message in request.messages:
        for file in message.attachments if isinstance(message, UserMessage) else ():
            if file.digest not in files:
                with suppress(UnknownAttachment):
                    files[file.digest] = _File(file.media_type, await attachment(file.digest))
    return files


def _must_say(stream: StreamedResponse) -> bool:
    """Return whether this provider's protocol always reports an end reason, so that an end without one is invalid.

    The check is by class name, because importing the classes would require both SDKs.
    """
    return any(
        kind.__name__ in ("OpenAIStreamedResponse", "AnthropicStreamedResponse") for kind in type(stream).__mro__
    )


def _end(response: ModelResponse, *, asks: bool) -> EndPart:
    from holdfast.agents.providers.messages import state_of

    used = response.usage
    reason: Reason = _REASONS.get(response.finish_reason or "stop", "other")
    return EndPart(
        usage=Usage(input_tokens=used.input_tokens, output_tokens=used.output_tokens, cost_usd=_cost(response)),
        reason="calls" if asks and reason == "stop" else reason,
        model=response.model_name or "",
        state=state_of(response),
    )


def _cost(response: ModelResponse) -> float:
    if not response.model_name:
        return 0.0
    try:
        return float(response.cost().total_price)
    except (LookupError, ValueError):
        return 0.0  # the price is unknown


def _variable_of(spelled: str) -> str:
    """Return the name of the API key's environment variable, for a hint."""
    provider = spelled.partition(":")[0].removesuffix("-chat").removesuffix("-responses")
    known = {"google": "GOOGLE_API_KEY", "bedrock": "AWS_BEARER_TOKEN_BEDROCK", "huggingface": "HF_TOKEN"}
    return known.get(provider, f"{provider.upper().replace('-', '_')}_API_KEY")


def _message_of(error: Any) -> str:
    body = error.body
    for name in ("error", "message"):
        if isinstance(body, dict) and name in body:
            body = body[name]
    return _plain(str(body))


def _plain(text: str) -> str:
    """Return one line of bounded length, with secrets redacted."""
    line = " ".join(redact(text).split())
    return line if len(line) <= 300 else f"{line[:300]}…"
