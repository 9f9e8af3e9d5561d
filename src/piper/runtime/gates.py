"""Gates: on one machine, communication kernels start only when all their ranks are ready for them.

A kernel that waits for its peers holds multiprocessors, and matrix products beside it take up to twice
as long. Here a stream says in memory that all ranks share that it has come to a communication, and waits
there for the others; only then does the kernel start. A waiting stream holds nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

import torch

SIZE = 1 << 20
_CELL = 64  # bytes between two ranks' numbers
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

    def gate(self, ranks: Sequence[int], rank: int) -> Gate:
        """A gate for the communications of a group. All ranks make all gates in one order."""
        first = self._address + self._free
        self._free += _CELL * len(ranks)
        if self._free > SIZE - _CELL:
            raise RuntimeError("too many groups for the memory of gates")
        cells = [first + _CELL * place for place in range(len(ranks))]
        mine = cells[ranks.index(rank)] if rank in ranks else 0
        return Gate(self, mine, [cell for cell in cells if cell != mine])


class Gate:
    def __init__(self, gates: Gates, mine: int, others: Sequence[int]) -> None:
        self._write, self._wait = gates._write, gates._wait
        self.mine = mine
        self.others = tuple(others)
        self.number = 0

    def meet(self, stream: int) -> None:
        """Have a stream wait until all members' streams have come to this meeting."""
        self.number += 1
        error = self._write(stream, self.mine, self.number, 0)
        for other in self.others:
            error = error or self._wait(stream, other, self.number, _AT_LEAST)
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
