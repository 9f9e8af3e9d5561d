"""Gates: on one machine, the kernel that receives a message starts only when its sender is ready.

A kernel that waits for its peer holds multiprocessors, and matrix products beside it take up to twice
as long. Here a sender's stream says in memory that all ranks share that it has come to a message, and
the receiver's stream waits for that; only then does its kernel start. A waiting stream holds nothing.

Nobody else waits: a device has fewer queues than a plan may have streams, so that a stream that waits
can hold up others of its rank. Whatever a receive waits for, its rank's later tasks may wait for too:
senders come first in the one order that all ranks dispatch in.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

SIZE = 1 << 20
_CELL = 64  # bytes between two channels' numbers
_AT_LEAST = 0  # the driver's flag of a wait for a number that is not below another


class Gates:
    """Cells in shared memory, which device streams write to and wait on."""

    def __init__(self, path: str, device: torch.device) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SIZE)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._free = 0
        library = ctypes.CDLL("libcuda.so.1")
        self._write, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
        for function in (self._write, self._wait):
            function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
        error = int(torch.cuda.cudart().cudaHostRegister(self._address, SIZE, 3))
        self.problem = f"cudaHostRegister gives {error}" if error else ""
        if not error:  # a trial, so that a driver without it is found here
            stream = torch.cuda.current_stream(device).cuda_stream
            error = self._write(stream, self._address + SIZE - _CELL, 0, 0)
            error = error or self._wait(stream, self._address + SIZE - _CELL, 0, _AT_LEAST)
            self.problem = f"the driver's stream operations give {error}" if error else ""

    def gate(self) -> Gate:
        """A gate for the messages of a channel. All ranks make all gates in one order."""
        cell = self._address + self._free
        self._free += _CELL
        if self._free > SIZE - _CELL:
            raise RuntimeError("too many channels for the memory of gates")
        return Gate(self, cell)


class Gate:
    """Both ends count the messages of a channel."""

    def __init__(self, gates: Gates, cell: int) -> None:
        self._write, self._wait = gates._write, gates._wait
        self.cell = cell
        self.number = 0

    def open(self, stream: int) -> None:
        """Let the next message through when the sender's stream comes to here."""
        self.number += 1
        self._check(self._write(stream, self.cell, self.number, 0))

    def pass_through(self, stream: int) -> None:
        """Have the receiver's stream wait for the next message."""
        self.number += 1
        self._check(self._wait(stream, self.cell, self.number, _AT_LEAST))

    def _check(self, error: int) -> None:
        if error:
            raise RuntimeError(f"CUDA error {error} of a stream operation")


def make_shared() -> str:
    """A file of zeros in memory; whoever has opened it keeps it when it is removed."""
    path = f"/dev/shm/piper-gates-{os.getpid()}-{os.urandom(4).hex()}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, SIZE)
    finally:
        os.close(descriptor)
    return path
