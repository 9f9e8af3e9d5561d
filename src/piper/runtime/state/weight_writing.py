"""Writing weights: what a rank writes of the model's tensors, into files that are laid out already."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from piper.runtime.state.patch_views import patch_view
from piper.stored.boxes import patches_in, runs_in
from piper.stored.weight_files import Place
from piper.stored.writers import Entry

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker

CHUNK = 4 << 20  # elements that are converted and written at once


def write_weights(
    worker: Worker, entries: Sequence[Entry], places: Mapping[str, Place], folder: str
) -> str:
    """Why it cannot, or nothing: training goes on in either case."""
    files: dict[str, int] = {}
    try:
        for entry in entries:
            place = places[entry.tensor]
            if place.file not in files:
                files[place.file] = os.open(os.path.join(folder, place.file), os.O_WRONLY)
            _write(files[place.file], place, worker, entry)
        for number in files.values():
            os.fsync(number)
    except OSError as problem:
        return f"{folder} cannot be written: {problem.strerror or problem}"
    finally:
        for number in files.values():
            os.close(number)
    return ""


def _write(file: int, place: Place, worker: Worker, entry: Entry) -> None:
    dtype = getattr(torch, place.dtype)
    shape = worker.plan.tensors[entry.tensor].shape
    for begin, run in _runs(_values(worker, entry), entry, shape):
        for part in run.split(CHUNK):
            data = part.detach().to("cpu", dtype).contiguous().view(torch.uint8).numpy()
            _write_all(file, memoryview(data), place.offset + begin * dtype.itemsize)
            begin += part.numel()


def _runs(values: Tensor, entry: Entry, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor]]:
    """An entry's elements as they lie in the whole tensor: from where on, and those of one run."""
    for patch in patches_in(entry.part, entry.first, entry.last):
        at, flat = 0, patch_view(values, patch).reshape(-1)
        for begin, num in runs_in(patch.box, shape):
            yield begin, flat[at : at + num]
            at += num


def _values(worker: Worker, entry: Entry) -> Tensor:
    if entry.holding < 0:
        return worker.weights.whole(entry.tensor).reshape(-1)
    held = worker.holdings[entry.holding]
    tensor = worker.held(held)
    assert tensor is not None
    return tensor.reshape(-1)[entry.first - held.first : entry.last - held.first]


def _write_all(file: int, data: memoryview, offset: int) -> None:
    """A file may take less than it is given."""
    while data:
        num = os.pwrite(file, data, offset)
        data, offset = data[num:], offset + num
