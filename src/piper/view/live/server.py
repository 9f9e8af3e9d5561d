"""LiveServer: a chronicle and recorded steps in; a page at a secret address of this machine out."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from piper.errors import RunError
from piper.view.live.address import Address, may_ask
from piper.view.live.chronicle import Chronicle
from piper.view.live.requests import Request
from piper.view.live.step_reports import StepReports

MOST_CLIENTS = 32  # connections at a time; each has a thread
LAST_WORDS = (
    3.0  # seconds that browsers have to hear how training ended, and to fetch its last step
)
NOBODY = 0.3  # seconds without a request, after which none will come
LOOK_SECONDS = 0.1


class LiveServer:
    """Serves in threads of its own until it is closed; then none of them is left, and no socket."""

    def __init__(self, address: Address, chronicle: Chronicle, reports: StepReports) -> None:
        self.address, self.chronicle, self.reports = address, chronicle, reports
        self.token = secrets.token_urlsafe(16)
        self.problem: Exception | None = None  # of a thread here; training says so
        self.closing = threading.Event()
        self._answering = 0  # requests that are being answered
        self._counting = threading.Lock()
        try:
            self._sockets = _Sockets(address, self)
        except OSError as error:
            where = f"{address.host}:{address.port}"
            raise RunError(
                f"the live view cannot be served at {where}: {error.strerror}",
                legal="another port; port 0 is a free one",
            ) from None
        self._thread = threading.Thread(target=self._serve, name="piper-watch", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self.address.url(self._sockets.server_address[1])}/{self.token}/"

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def answers_to(self, host: str) -> bool:
        return may_ask(host, self.address)

    def _serve(self) -> None:
        try:
            self._sockets.serve_forever(LOOK_SECONDS)
        except Exception as error:
            self.problem = error

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is answered that knew the token."""
        with self._counting:
            self._answering += 1
        try:
            yield
        finally:
            with self._counting:
                self._answering -= 1

    def close(self) -> None:
        """Browsers that listen hear the last events first, and get the last step, if they are quick."""
        listened = self._answering > 0
        self.chronicle.end()
        self.closing.set()
        if listened:
            self._linger()
        self._sockets.shutdown()
        self.reports.close()
        self._sockets.end()
        self._thread.join()

    def _linger(self) -> None:
        last = begun = time.monotonic()
        while (now := time.monotonic()) < begun + LAST_WORDS and now < last + NOBODY:
            if self._answering:
                last = now
            time.sleep(0.02)


class _Sockets(http.server.HTTPServer):
    """The listening socket and the connections, a thread each."""

    allow_reuse_address = True
    request_queue_size = MOST_CLIENTS

    def __init__(self, address: Address, server: LiveServer) -> None:
        self.address_family = address.family
        self.live = server
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        super().__init__((address.host, address.port), Request)

    def server_bind(self) -> None:
        """Without asking a name server what this machine is called, as HTTPServer does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= MOST_CLIENTS:
                self.shutdown_request(request)
                return
            thread = threading.Thread(
                target=self._answer, args=(request, client_address), name="piper-watch", daemon=True
            )
            self._open[request] = thread
            thread.start()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:  # it has gone, or does not read
            pass
        except Exception as error:
            self.live.problem = error
        finally:
            with self._lock:
                self._open.pop(request, None)
                self.shutdown_request(request)

    def end(self) -> None:
        """Cut off who is still there; no socket and no thread is left."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # also for a child of a fork, which has it, too
        self.server_close()
        with self._lock:
            threads = list(self._open.values())
            for request in self._open:
                with contextlib.suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()
