"""RayMember: a Member in an actor of Ray. It does not need Ray itself, which calls its methods."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import socket
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piper.runtime.board import NOTHING
from piper.runtime.member import Member, join, leave

_SIOCGIFADDR = 0x8915  # Linux: the address of a network interface


class RayMember:
    """Commands are called one after another in one thread; `where` in another, at any time."""

    def __init__(self, rank: int, ip: str) -> None:
        self.rank = rank
        self.ip = ip
        self.member: Member | None = None
        self.store: dist.TCPStore | None = None

    def process(self) -> int:
        return os.getpid()

    def open(self, seconds: float) -> int:
        """Serve the store at which all ranks meet; its port."""
        wait = timedelta(seconds=seconds)
        self.store = dist.TCPStore(self.ip, 0, None, True, wait, wait_for_workers=False)
        return self.store.port

    def join(self, num_ranks: int, device: str, meet: tuple[str, int], seconds: float) -> None:
        torch.set_num_threads(1)
        interface = interface_of(self.ip)
        if (
            interface is not None
        ):  # else gloo takes the one of the host's name, which others may not reach
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        store = self.store or dist.TCPStore(
            *meet, None, False, timedelta(seconds=seconds), wait_for_workers=False
        )
        join(self.rank, num_ranks, store=store, timeout=seconds)
        self.member = Member(self.rank, device=device)

    def answer(self, message: bytes) -> bytes:
        assert self.member is not None
        name, payload = pickle.loads(message)
        answer = self.member.answer(name, payload)
        return pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)

    def where(self) -> tuple[int, int, int]:
        if self.member is None:
            return 0, NOTHING, NOTHING
        self.member.look()
        step, task, waits = self.member.cells[:3]
        return step, task, waits

    def leave(self) -> None:
        leave()


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
