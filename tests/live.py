"""A client of the live view: requests as they stand, and a listener that reads the events."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

SECONDS = 60.0


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def ask(url: str, method: str, path: str, *, hosts: Sequence[str] = ("127.0.0.1",)) -> Answer:
    """With the Host headers that are given."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=SECONDS)
    try:
        connection.putrequest(method, path, skip_host=True)
        for host in hosts:
            connection.putheader("Host", host)
        connection.endheaders()
        found = connection.getresponse()
        return Answer(found.status, found.headers, found.read())
    finally:
        connection.close()


class Listener:
    """Reads the events of a live view as they come."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 0), SECONDS)
        request = f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
        self._socket.sendall(request.encode())
        self._file = self._socket.makefile("rb")
        self.status = int(self._file.readline().split()[1])
        while self._file.readline().strip():
            pass
        self.latest: dict[str, Any] = {}  # of each event
        self.steps: list[int] = []
        self.states: list[str] = []

    def until(self, name: str) -> dict[str, Any]:
        """The latest of each event, as soon as one has this name."""
        while True:
            events = self.message()
            assert events is not None, f"the events ended without {name}"
            if any(event == name for event, _ in events):
                return self.latest

    def message(self) -> list[Any] | None:
        """The next events; None at the end."""
        for line in self._file:
            if line.startswith(b"data: "):
                events: list[Any] = json.loads(line.removeprefix(b"data: "))
                self.latest.update(events)
                for name, facts in events:
                    if name == "curves":
                        self.steps = [step for step, _ in facts.get("loss", [])]
                    elif name == "numbers" and "loss" in facts["values"]:
                        self.steps.append(facts["step"])
                    elif name == "state":
                        self.states.append(facts["name"])
                return events
        return None

    @property
    def is_over(self) -> bool:
        return self.message() is None

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()


def threads_left() -> list[str]:
    """Of live views in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name == "piper-watch"]
