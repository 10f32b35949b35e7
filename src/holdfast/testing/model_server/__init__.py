"""A model provider on this machine: it speaks OpenAI's and Anthropic's protocols in streams, by a script, with faults.

    async with ModelServer([Reply(text="Hello.")]) as server:
        ...                                     # server.environment points a model at it
        assert server.exchanges[0].ended == "whole"

    python -m holdfast.testing.model_server     # serves the demo model until Ctrl-C

It keeps what it saw of each request, and when and how its answer ended: a client that stops asking must close the
connection, and here that shows. Requests that the real providers refuse are refused (status 400).
"""

from holdfast.testing.model_server.server import Exchange, ModelServer, Reply, Script

__all__ = ["Exchange", "ModelServer", "Reply", "Script"]
