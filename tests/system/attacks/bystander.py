"""The bystander's process: sends and stops on order, timed one by one, apart from the attack's own event loop.

An order is a JSON line on stdin, its figures are one on stdout. Most sends reuse a connection, each tenth opens a new
one, so that a server that lets nobody in is seen.
"""

from __future__ import annotations

import http.client
import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

_SESSIONS = 20
_ANSWER_S = 30.0
_FRESH_EVERY = 10


@dataclass
class Bystander:
    """One principal with one connection at a time."""

    port: int
    key: str
    number: int = 0
    connection: http.client.HTTPConnection | None = None
    sends_s: list[float] = field(default_factory=list)
    stops_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def carry_out(self, sends: int, stops: int) -> dict[str, Any]:
        """Send and stop that often, the stops spread over the sends; return the figures."""
        self.sends_s, self.stops_s, self.failures = [], [], []
        for number in range(sends):
            if number % _FRESH_EVERY == 0:
                self.disconnect()
            self.sends_s.append(self.timed(self.send))
            if stops and number % max(1, sends // stops) == 0 and len(self.stops_s) < stops:
                self.stops_s.append(self.timed(self.stop))
        return {"sends_s": self.sends_s, "stops_s": self.stops_s, "failures": self.failures[:20]}

    def timed(self, work: Any) -> float:
        """Do it and return how long it took; what went wrong is noted."""
        began = time.perf_counter()
        try:
            work()
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.failures.append(f"{work.__name__}: {type(error).__name__}: {error}")
            self.disconnect()
        return time.perf_counter() - began

    def send(self) -> None:
        """Send a message to one of its sessions."""
        self.number += 1
        body = {"content": "hi", "idempotency_key": f"send-{self.number}"}
        status, answer = self.ask("POST", f"/v1/sessions/by-{self.number % _SESSIONS}/messages", body)
        assert status == 202, (status, answer)

    def stop(self) -> None:
        """Start a run that never ends, and stop it."""
        self.number += 1
        path = f"/v1/sessions/stop-{self.number}"
        body = {"content": "go", "agent": "endless", "idempotency_key": f"go-{self.number}"}
        status, answer = self.ask("POST", f"{path}/messages", body)
        assert status == 202, (status, answer)
        status, answer = self.ask("POST", f"{path}/stop", {})
        assert status == 200, (status, answer)

    def ask(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """The answer to a request; a connection that the server closed between two requests is opened anew, once."""
        reused = self.connection is not None
        try:
            return self.exchange(method, path, body)
        except (ConnectionError, http.client.RemoteDisconnected):
            self.disconnect()
            if not reused:
                raise
            return self.exchange(method, path, body)

    def exchange(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """One request and its answer."""
        if self.connection is None:
            self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ANSWER_S)
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        self.connection.request(method, path, json.dumps(body).encode(), headers)
        answer = self.connection.getresponse()
        return answer.status, answer.read()

    def disconnect(self) -> None:
        """Close its connection."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


def main() -> None:
    """Carry out one order after another until stdin ends."""
    bystander = Bystander(int(sys.argv[1]), sys.argv[2])
    for line in sys.stdin:
        print(json.dumps(bystander.carry_out(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
