"""Measured memory: workers in, bytes of unique live storages out, whatever the plan says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from piper.plan.types import Slot
from piper.runtime.worker import Worker


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind some tensors, each counted once."""
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values())


def live(worker: Worker, wanted: Callable[[Slot], bool]) -> list[Tensor]:
    """The tensors that a worker's slots hold now."""
    pairs = zip(worker.me.slots, worker.slots, strict=True)
    return [value for slot, value in pairs if isinstance(value, Tensor) and wanted(slot)]


def optimizer_tensors(worker: Worker, buckets: Iterable[int] | None = None) -> list[Tensor]:
    """Masters and optimizer state, without scalars such as the number of steps."""
    found: list[Tensor] = []
    for bucket, updater in worker.updaters.items():
        if buckets is None or bucket in buckets:
            found += [master.detach() for master in updater.masters]
            states: Any = updater.optimizer.state.values()
            found += [t for s in states for t in s.values() if isinstance(t, Tensor) and t.dim()]
    return found
