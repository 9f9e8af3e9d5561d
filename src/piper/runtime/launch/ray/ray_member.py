"""RayMember: a Member in an actor of Ray. It does not need Ray itself, which calls its methods."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piper.runtime.failure.board import PULSE, Board, clear
from piper.runtime.launch.member import Member, leave, told
from piper.runtime.launch.process import LOOK_SECONDS

_SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


class RayMember:
    """Commands are called one after another in one thread; `where` in another, at any time."""

    def __init__(self, rank: int, ip: str) -> None:
        self.rank = rank
        self.ip = ip
        self.cells = Board(1).cells(0)
        clear(self.cells)
        self.member: Member | None = None
        torch.set_num_threads(1)
        interface = interface_of(ip)
        if interface:  # else gloo takes that of the host's name, which others may not reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        threading.Thread(target=self._watch, daemon=True, name="piper-watch").start()

    def answer(self, message: bytes) -> bytes:
        """What a command gave, and where this rank is."""
        name, payload = pickle.loads(message)
        if self.member is None:
            status, found = self._start(payload)
        else:
            status, found = self.member.answer(name, payload)
        return pickle.dumps((status, found, self.where()), protocol=pickle.HIGHEST_PROTOCOL)

    def _start(self, device: str) -> tuple[str, Any]:
        try:
            self.member = MeetingMember(self.rank, self.ip, device=device, cells=self.cells)
        except Exception as error:
            return "error", told(error, "start")
        return "ok", os.getpid()

    def where(self) -> list[int]:
        return self.cells.tolist()

    def leave(self) -> None:
        leave()

    def _watch(self) -> None:
        """Beside the work: show that this process runs, and note what it waits for."""
        while True:
            self.cells[PULSE] += 1
            if self.member is not None:
                self.member.look()
            time.sleep(LOOK_SECONDS)


class MeetingMember(Member):
    """A Member whose ranks share no folder: they meet at a store that rank 0 serves."""

    def __init__(self, rank: int, ip: str, *, device: str, cells: memoryview) -> None:
        super().__init__(rank, device=device, cells=cells)
        self.ip = ip
        self.store: dist.TCPStore | None = None

    def open(self, seconds: float) -> int:
        """Serve the store, if this is rank 0; its port."""
        if self.rank != 0:
            return 0
        wait = timedelta(seconds=seconds)
        self.store = dist.TCPStore(self.ip, 0, None, True, wait, wait_for_workers=False)
        return self.store.port

    def join(self, payload: Mapping[str, Any]) -> str:
        settings = dict(payload)
        host, port = settings.pop("meet")
        wait = timedelta(seconds=settings["timeout"])
        store = self.store or dist.TCPStore(host, port, None, False, wait, wait_for_workers=False)
        return super().join({**settings, "store": store})


def interface_of(ip: str) -> str | None:
    """The name of the network interface that has an address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                request = struct.pack("256s", name.encode()[:15])
                found: Any = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(found[20:24]) == ip:
                    return name
    return None
