"""Measured memory: workers in, bytes of unique live storages out, whatever the plan says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from piper.plan.slots import Slot
from piper.runtime.worker.worker import Worker


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values())


def live(worker: Worker, wanted: Callable[[Slot], bool]) -> list[Tensor]:
    """The tensors that a worker's slots hold now."""
    pairs = zip(worker.me.slots, worker.slots, strict=True)
    return [value for slot, value in pairs if isinstance(value, Tensor) and wanted(slot)]
