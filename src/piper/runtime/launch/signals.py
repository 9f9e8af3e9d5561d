"""Signals that a process was started to ignore in, their usual handlers out."""

from __future__ import annotations

import signal
import threading


def default_signals() -> None:
    """Heed interrupt, quit and terminate, which a shell makes its background jobs ignore.

    Ignored signals pass to all processes that such a job starts. A hangup stays ignored: `nohup`
    asked for that.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # Python changes handlers in the main thread alone
    usual = {signal.SIGINT: signal.default_int_handler}
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual.get(number, signal.SIG_DFL))
