"""A scripted model provider on this machine: it speaks OpenAI's and Anthropic's streaming protocols, with faults.

    async with ModelServer([Reply(text="Hello.")]) as server:
        ...                                     # server.environment points a model at it
        assert server.exchanges[0].ended == "whole"

    python -m holdfast.testing.model_server     # serves the demo model until Ctrl-C

It records each request, and when and how its answer ended: a client that stops reading must close the connection, and
the record shows whether it did. Requests that the real providers refuse are refused (status 400).
"""

from holdfast.testing.model_server.server import Exchange, ModelServer, Reply, Script

__all__ = ["Exchange", "ModelServer", "Reply", "Script"]
