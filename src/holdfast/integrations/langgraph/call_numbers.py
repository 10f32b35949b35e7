"""Number the calls of a graph's nodes, so that each call keeps its id when its node runs again.

After a node's question has been answered, in this attempt or a later one, the node runs again from its beginning. If
the graph is idempotent, its nodes also run again after a crash. The order of calls in parallel nodes can vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.runnables.config import var_child_runnable_config

from holdfast.agents.journal import CallPath

__all__ = ["NodeCallPath"]


class NodeCallPath(CallPath):
    """Numbers the calls of each node execution separately, with the same numbers in every attempt.

    Parameters:
        path: call path of the graph.
        inside: numbers of the tasks that run subgraphs, by task id; tasks are numbered in the order of their first
            call.
    """

    __slots__ = ("_inside", "_of_node")

    def __init__(self, path: str, inside: dict[str, int]) -> None:
        super().__init__(path)
        self._inside = inside
        self._of_node: dict[str, Iterator[int]] = {}

    def next_id(self) -> str:
        """See `CallPath.next_id`."""
        where = self._node_of(var_child_runnable_config.get())
        return f"{self.path}.{where}.{next(self._of_node.setdefault(where, itertools.count(1)))}"

    def _node_of(self, config: Mapping[str, Any] | None) -> str:
        """Return a text that identifies the superstep and the node in which the calling code runs."""
        metadata = (config or {}).get("metadata") or {}
        if "langgraph_node" not in metadata:
            return "outside"
        where: list[object] = []
        for level in str(metadata.get("langgraph_checkpoint_ns", "")).split("|")[:-1]:
            name, _, task = level.partition(":")
            where.append(f"{name}-{self._inside.setdefault(task, len(self._inside) + 1)}")
        where += [metadata.get("langgraph_step"), metadata["langgraph_node"]]
        where += [part for part in metadata.get("langgraph_path", ())[1:] if isinstance(part, (str, int))]
        return "/".join(map(str, where)).replace(".", "-")
