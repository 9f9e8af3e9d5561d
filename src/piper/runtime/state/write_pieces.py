"""Writing pieces: what a rank writes of a run's state in, one file of torch's checkpoint format out."""

from __future__ import annotations

import io
import math
import os
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from piper.runtime.state.patch_views import patch_view
from piper.stored.boxes import Box, patches_in, within
from piper.stored.stored_pieces import Piece, StoredTensor
from piper.stored.writers import Entry

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker

Written = tuple[
    tuple[str, ...], StoredTensor
]  # where it lies in a nested state_dict, and its pieces
PIECE_BYTES = (
    16 << 20
)  # at most, so that a rank with a part of a tensor reads little more than that


class Writing:
    """A file that is being written beside the work, from copies of what it will hold."""

    def __init__(self, worker: Worker, entries: Sequence[Entry], folder: str) -> None:
        self.plan = worker.plan
        began = time.perf_counter()
        copies = ((entry, _copy(worker, entry)) for entry in entries)
        self.copies = [(entry, copy) for entry, copy in copies if copy is not None]
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)
        self.seconds = time.perf_counter() - began  # that the work waited
        self.file = f"__{worker.me.rank}_0.distcp"
        self.path = os.path.join(folder, self.file)
        self.written: list[Written] = []
        self.failure = ""
        self.thread = threading.Thread(target=self._run, name="piper-save", daemon=True)
        self.thread.start()

    def result(self) -> dict[str, Any] | None:
        """What was written where, or why not; None as long as it is being written."""
        if self.thread.is_alive():
            return None
        return {"tensors": msgspec.json.encode(self.written), "failure": self.failure}

    def _run(self) -> None:
        try:
            with open(self.path, "wb", buffering=0) as file:
                while self.copies:
                    self._write(file, *self.copies.pop())
                os.fsync(file.fileno())
        except OSError as problem:
            self.failure = f"{self.path} cannot be written: {problem.strerror or problem}"
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"

    def _write(self, file: Any, entry: Entry, tensor: Tensor) -> None:
        pieces = []
        for box, part in _boxes(entry, tensor):
            stream = io.BytesIO()
            torch.save(part.clone(), stream)
            data = stream.getbuffer()
            offset = file.tell()
            _write_all(file, data)
            pieces.append(Piece(box, self.file, offset, len(data), "torch", zlib.crc32(data)))
        dtype = str(tensor.dtype).removeprefix("torch.")
        shape = tuple(tensor.shape) if entry.whole else self.plan.tensors[entry.tensor].shape
        self.written.append((entry.path, StoredTensor(dtype, shape, tuple(pieces))))


def _write_all(file: Any, data: memoryview) -> None:
    """A raw file may take less than it is given."""
    while data:
        data = data[file.write(data) :]


def _copy(worker: Worker, entry: Entry) -> Tensor | None:
    """On the CPU, so that training may go on; None for what an optimizer has not made yet."""
    if entry.holding < 0:
        return worker.weights.whole(entry.tensor)
    tensor = worker.held(worker.holdings[entry.holding])
    if tensor is None:
        return None
    if not entry.whole:
        begin = worker.holdings[entry.holding].first
        tensor = tensor.reshape(-1)[entry.first - begin : entry.last - begin]
    if tensor.device.type != "cuda":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _boxes(entry: Entry, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Boxes of the tensor that are not too large, and their elements."""
    if entry.whole:
        yield Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor
        return
    limit = PIECE_BYTES // tensor.element_size()
    for patch in patches_in(entry.part, entry.first, entry.last):
        for box in divided(patch.box, limit):
            yield box, patch_view(tensor, patch)[within(box, patch.box).slices]


def divided(box: Box, limit: int) -> Iterator[Box]:
    """Boxes of at most so many elements, in row-major order."""
    if box.num_elements <= limit or not box.size:
        yield box
        return
    row = math.prod(box.size[1:])
    rows = max(limit // row, 1)
    for begin in range(0, box.size[0], rows):
        size = (min(rows, box.size[0] - begin), *box.size[1:])
        part = Box((box.start[0] + begin, *box.start[1:]), size)
        if row <= limit:
            yield part
        else:
            for inner in divided(Box(part.start[1:], part.size[1:]), limit):
                yield Box((part.start[0], *inner.start), (1, *inner.size))
