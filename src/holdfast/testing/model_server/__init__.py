"""A scripted local model provider that speaks OpenAI's and Anthropic's streaming protocols and can inject faults.

    async with ModelServer([Reply(text="Hello.")]) as server:
        ...                                     # server.environment points a model at it
        assert server.exchanges[0].ended == "whole"

    python -m holdfast.testing.model_server     # serves the demo model until Ctrl-C

The server records each request, and when and how the answer ended. A client that stops reading must close the
connection; the record shows whether the client did. The server refuses, with status 400, requests that the real
providers refuse.
"""

from holdfast.testing.model_server.server import Exchange, ModelServer, Reply, Script

__all__ = ["Exchange", "ModelServer", "Reply", "Script"]
