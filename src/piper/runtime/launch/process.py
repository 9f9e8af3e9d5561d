"""The main function of a worker process: do as the driver asks, and end with it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from piper.runtime.failure.board import PULSE, Board
from piper.runtime.launch.member import Member, leave, told
from piper.runtime.launch.mps import clear_away
from piper.runtime.launch.pickles import receive, send
from piper.runtime.launch.signals import default_signals

LOOK_SECONDS = 0.5
_ending = threading.Lock()


def main(rank: int, descriptor: int, folder: str, make: Callable[..., Member] = Member) -> None:
    """Serve `rank`; the driver is at the other end of the socket `descriptor`."""
    default_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, who then ends us
    os.set_inheritable(descriptor, False)
    torch.set_num_threads(1)
    try:
        with open(os.path.join(folder, "settings.json")) as file:
            settings = json.load(file)
        board = Board(settings["num_ranks"], os.path.join(folder, "board"))
    except FileNotFoundError:
        os._exit(1)  # the driver was gone before we began, and another rank has cleared up
    members: list[Member] = []
    _watch(board.cells(rank), members, settings["driver"], folder)
    connection: Connection[Any, Any] = Connection(descriptor)
    try:
        try:
            device = settings["devices"][rank]
            members.append(make(rank, device=device, cells=board.cells(rank)))
        except Exception as error:
            send(connection, ("error", told(error, "start")))
        else:
            send(connection, ("ok", {"pid": os.getpid(), "device": device}))
        while True:
            try:
                name, payload = receive(connection)
            except MemoryError as error:
                send(connection, ("error", told(error, "step")))
                continue
            if name == "close":
                break
            send(connection, members[0].answer(name, payload))
    except (EOFError, ConnectionError):
        _end_alone(folder)
    leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end takes as long as its start


def _watch(cells: memoryview, members: list[Member], driver: int, folder: str) -> None:
    """Beside the work: show that this process runs, note what it waits for, and end with the driver."""

    def look() -> None:
        while os.getppid() == driver:
            cells[PULSE] += 1
            for member in members:
                member.look()
            time.sleep(LOOK_SECONDS)
        _end_alone(folder)

    threading.Thread(target=look, daemon=True, name="piper-watch").start()


def _end_alone(folder: str) -> None:
    """The driver is gone: clear up after it, and end whatever this rank is waiting for."""
    with _ending:  # whichever thread comes first
        clear_away(folder)
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
