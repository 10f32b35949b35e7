"""The wire protocols of the model server: how each reads, checks and answers a request.

Each protocol refuses faulty requests as its provider does: requests that contain a call without a result, a result
without a call, an id or name with invalid characters, arguments that are not an object, or an empty text block.
"""

from holdfast.testing.model_server.wires.chat import ChatWire
from holdfast.testing.model_server.wires.messages import MessagesWire
from holdfast.testing.model_server.wires.responses import ResponsesWire
from holdfast.testing.model_server.wires.wire import WireFormat

__all__ = ["ChatWire", "MessagesWire", "ResponsesWire", "WireFormat"]
