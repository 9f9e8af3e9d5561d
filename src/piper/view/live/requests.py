"""Request: one request of a browser in; the page, the events as they come, or a step's report, out."""

from __future__ import annotations

import base64
import hashlib
import http.server
import re
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from piper.view.page import live_page

if TYPE_CHECKING:
    from piper.view.live.server import LiveServer

PATIENCE = 10.0  # seconds for a browser to send its request, or to take what it is sent
PAUSE = 0.2  # seconds between two messages: what comes meanwhile is sent together
QUIET = 15.0  # seconds without news after which the connection is tried
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.S)


class Request(http.server.BaseHTTPRequestHandler):
    """Whoever does not know the token, or asks for another machine, learns nothing."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "Piper", ""
    timeout = PATIENCE

    @property
    def live(self) -> LiveServer:
        found: LiveServer = self.server.live  # type: ignore[attr-defined]
        return found

    def do_GET(self) -> None:
        rest = self._asked()
        if rest is None:  # whatever is asked for
            self._send(403, b"forbidden\n")
        elif self.command != "GET":
            self._send(405, b"only GET\n")
        elif rest in _ANSWERS:
            with self.live.answering():
                _ANSWERS[rest](self)
        else:
            self._send(404, b"not found\n")

    do_HEAD = do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_GET

    def _asked(self) -> str | None:
        """What is behind the token in the path; None without the right one. It is compared first, and in
        constant time, whatever else is wrong."""
        token, _, rest = self.path.removeprefix("/").partition("/")
        known = self.live.knows(token)
        hosts = self.headers.get_all("Host") or []
        here = len(hosts) == 1 and self.live.answers_to(hosts[0])
        return rest if known and here else None

    def _head(self, status: int, kind: str, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def _send(self, status: int, body: bytes, kind: str = "text/plain", **headers: str) -> None:
        self._head(status, kind, Content_Length=str(len(body)), **headers)
        if self.command != "HEAD":
            self.wfile.write(body)

    def _page(self) -> None:
        body, policy = _page()
        kind = "text/html; charset=utf-8"
        self._send(200, body, kind, Content_Security_Policy=policy)

    def _events(self) -> None:
        """Until training ends, or the browser goes, or does not take them."""
        self._head(200, "text/event-stream")
        self.close_connection = True
        chronicle, moment, is_last = self.live.chronicle, -1, False
        while not is_last:
            events, moment, is_last = chronicle.since(moment, within=QUIET)
            self.wfile.write(_message(events) if events else b": quiet\n\n")
            self.live.closing.wait(PAUSE)
        self.wfile.write(_message([("over", {})]))

    def _step(self) -> None:
        """The one that was recorded last, with its number; nothing without one."""
        found = self.live.reports.latest()
        if found is None:
            self._head(204, "text/plain")
        else:
            number, block = found
            self._send(200, block, "application/octet-stream", Piper_Step=str(number))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what is printed is the training's."""


_ANSWERS = {"": Request._page, "events": Request._events, "step": Request._step}


def _message(events: Any) -> bytes:
    """JSON has no numbers that are not finite: they become null."""
    return b"data: " + msgspec.json.encode(events) + b"\n\n"


@cache
def _page() -> tuple[bytes, str]:
    """The page, and what it may do: run its own script, and ask where it comes from."""
    html = live_page()
    scripts = [hashlib.sha256(code.encode()).digest() for code in _SCRIPT.findall(html)]
    hashes = " ".join(f"'sha256-{base64.b64encode(each).decode()}'" for each in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), policy
