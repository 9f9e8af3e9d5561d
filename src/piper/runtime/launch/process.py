"""The main function of worker processes' parent, and of workers: do as the driver asks, end with it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from piper.runtime.failure.board import PULSE, Board
from piper.runtime.launch.member import Member, leave, told
from piper.runtime.launch.mps import clear_away
from piper.runtime.launch.parent_process import DONE, exit_code
from piper.runtime.launch.pickles import receive, send
from piper.runtime.launch.signals import default_signals

LOOK_SECONDS = 0.5


def main(descriptor: int, folder: str, make: Callable[..., Member] = Member) -> None:
    """Wait for the driver, at the other end of the socket `descriptor`, to ask for workers; fork them,
    say what becomes of them, and end with the driver, all together."""
    default_signals()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's, who then ends us
    os.set_inheritable(descriptor, False)
    driver = os.getppid()
    gc.freeze()  # what is imported stays for good: forked processes leave it where it is
    pids: list[int] = []
    with socket.socket(fileno=descriptor) as line:
        line.settimeout(LOOK_SECONDS)
        while True:
            message, ends = _next(line, driver)
            if not ends:
                break
            pids.append(_fork(int(message), ends[0], line, folder, make))
            with contextlib.suppress(OSError):  # the driver is gone, which is seen next
                line.send(b"pid %s %d" % (message, pids[-1]))
            if len(pids) == _settings(folder)["num_ranks"]:
                for rank, pid in enumerate(pids):
                    watch = (line, rank, pid)
                    threading.Thread(target=_tell_of_end, args=watch, daemon=True).start()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
    if message != DONE:  # the driver is gone
        clear_away(folder)
    os._exit(0)


def _next(line: socket.socket, driver: int) -> tuple[bytes, list[int]]:
    """What the driver says, with a socket or without; nothing if it is gone. A process of its own may
    hold its end open after its death."""
    while os.getppid() == driver:
        try:
            message, ends, _, _ = socket.recv_fds(line, 64, 1)
            return message, ends
        except TimeoutError:
            continue
        except ConnectionError:
            break
    return b"", []


def _tell_of_end(line: socket.socket, rank: int, pid: int) -> None:
    """Its process number stays taken until this process ends, so that nobody can mistake another."""
    with contextlib.suppress(OSError):  # we end
        line.send(b"code %d %d" % (rank, exit_code(pid) or 0))


def _settings(folder: str) -> dict[str, Any]:
    with open(os.path.join(folder, "settings.json")) as file:
        settings: dict[str, Any] = json.load(file)
    return settings


def _fork(
    rank: int, end: int, line: socket.socket, folder: str, make: Callable[..., Member]
) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(end)
        return pid
    try:
        line.close()
        _work(rank, end, folder, parent, make)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _work(
    rank: int, descriptor: int, folder: str, parent: int, make: Callable[..., Member]
) -> None:
    """Serve `rank`; the driver is at the other end of the socket `descriptor`."""
    torch.set_num_threads(1)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # else all ranks would draw the same
    try:
        settings = _settings(folder)
        board = Board(settings["num_ranks"], os.path.join(folder, "board"))
    except FileNotFoundError:
        os._exit(1)  # the driver was gone before we began, and another rank has cleared up
    os.environ.clear()
    os.environ.update(settings["environments"][rank])
    os.chdir(settings["cwd"])
    members: list[Member] = []
    _watch(board.cells(rank), members, parent, folder)
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
        threading.Event().wait()  # the driver is gone: the parent ends us
    leave()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end takes as long as its start


def _watch(cells: memoryview, members: list[Member], parent: int, folder: str) -> None:
    """Beside the work: show that this process runs, note what it waits for, and end with its
    parent."""

    def look() -> None:
        while os.getppid() == parent:
            cells[PULSE] += 1
            for member in members:
                member.look()
            time.sleep(LOOK_SECONDS)
        clear_away(folder)
        os._exit(1)

    threading.Thread(target=look, daemon=True, name="piper-watch").start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
