"""The wire protocols of the model server: how each reads, checks and answers a request.

Each protocol refuses requests that its provider refuses: a call without a result, a result without a call, ids and
names with invalid characters, arguments that are not an object, and empty text blocks.
"""

from holdfast.testing.model_server.wires.chat import ChatWire
from holdfast.testing.model_server.wires.messages import MessagesWire
from holdfast.testing.model_server.wires.responses import ResponsesWire
from holdfast.testing.model_server.wires.wire import WireFormat

__all__ = ["ChatWire", "MessagesWire", "ResponsesWire", "WireFormat"]
