"""Slow data: reads of this process, watched; data that gives no batch for long is named in an error.

Who waits is the main thread, inside of the user's iterator or of torch's DataLoader. An interrupt, as
of Ctrl-C, ends such a wait; a thread beside it sends one when the time is over.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

from piper.errors import RunError

_LEGAL = "data that comes sooner, or launch(..., timeout=SECONDS)"
_LOOKS = 8  # how often the time is looked at before it is over


class SlowData:
    """Watches reads of `data`, each of which may take `seconds`."""

    def __init__(self, data: str, seconds: float) -> None:
        self.data = data
        self.seconds = seconds
        self._lock = threading.Lock()
        self._begun: float | None = None  # when the read under way has
        self._fired = False
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a batch is read. Only the main thread can be interrupted."""
        if not _interruptible():
            yield
            return
        with self._lock:
            self._begun = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, daemon=True)
                self._thread.start()
        try:
            yield
            self._end()
        except KeyboardInterrupt:
            self._begun = None
            if not self._fired:
                raise
            raise self._error() from None
        finally:
            self._begun = None

    def _end(self) -> None:
        with self._lock:
            self._begun = None
        if self._fired:  # the interrupt that was sent in the last moment comes here
            time.sleep(1.0)

    def _error(self) -> RunError:
        self._fired = False
        return RunError(
            f"{self.data} hangs: no batch has come for {self.seconds:g} s",
            details=["this process reads it, and sends every rank its rows"],
            legal=_LEGAL,
        )

    def _watch(self) -> None:
        """Until the time is over, or nothing was read for as long."""
        main = threading.main_thread().ident
        assert main is not None
        last = time.monotonic()
        while True:
            time.sleep(self.seconds / _LOOKS)
            now = time.monotonic()
            with self._lock:
                begun = self._begun
                last = now if begun is not None else last
                if begun is not None and now - begun >= self.seconds:
                    self._fired = True
                    signal.pthread_kill(main, signal.SIGINT)
                elif now - last < self.seconds:
                    continue
                self._thread = None
                return


def _interruptible() -> bool:
    own = threading.current_thread() is threading.main_thread()
    return own and signal.getsignal(signal.SIGINT) is signal.default_int_handler
