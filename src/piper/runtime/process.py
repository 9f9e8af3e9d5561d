"""The main function of a worker process: connect to the driver, then do as it asks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Client

import torch

from piper.runtime.board import Board
from piper.runtime.member import Member, join, leave
from piper.runtime.messages import receive, send

LOOK_SECONDS = 0.5


def main(rank: int, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, who then ends us
    torch.set_num_threads(1)
    with open(os.path.join(folder, "settings.json")) as file:
        settings = json.load(file)
    key = bytes.fromhex(os.environ.pop("PIPER_KEY"))
    num_ranks, device = settings["num_ranks"], settings["devices"][rank]
    board = Board(num_ranks, os.path.join(folder, "board"))
    connection = Client(os.path.join(folder, "driver"), authkey=key)
    member = Member(rank, device=device, cells=board.cells(rank))
    _watch(member, settings["driver"], folder)
    store = os.path.join(folder, "store")
    send(connection, {"rank": rank, "pid": os.getpid(), "device": device})
    join(rank, num_ranks, init_method=f"file://{store}", timeout=settings["timeout"])
    try:
        while True:
            name, payload = receive(connection)
            if name == "close":
                break
            send(connection, member.answer(name, payload))
    except (EOFError, ConnectionError):
        pass  # the driver is gone
    finally:
        leave()


def _watch(member: Member, driver: int, folder: str) -> None:
    """Beside the work: end with the driver, whatever this rank is waiting for, and say what that is."""

    def look() -> None:
        while os.getppid() == driver:
            time.sleep(LOOK_SECONDS)
            member.look()
        if member.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="piper-watch").start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
