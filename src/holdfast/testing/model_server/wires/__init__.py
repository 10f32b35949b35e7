"""The wire protocols that the model server speaks: how each reads a request, what it objects to, and how it answers.

They refuse what their providers refuse: a call without its result, a result without its call, ids and names in letters
that are not allowed, arguments that are not an object, and text blocks with nothing in them.
"""

from holdfast.testing.model_server.wires.chat import ChatWire
from holdfast.testing.model_server.wires.messages import MessagesWire
from holdfast.testing.model_server.wires.responses import ResponsesWire
from holdfast.testing.model_server.wires.wire import WireFormat

__all__ = ["ChatWire", "MessagesWire", "ResponsesWire", "WireFormat"]
