"""Storages: what a worker really holds, measured on its live tensors, whatever the plan says of them."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from piper.runtime.worker import Worker

_PARAMETERS = ("param", "flat", "shard", "buffer")


def held_bytes(worker: Worker) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state (with masters) and all else, each storage once."""
    seen: set[int] = set()
    slots = list(zip(worker.me.slots, worker.slots, strict=True))
    found = {
        "parameters": _new(seen, (t for s, t in slots if s.kind in _PARAMETERS)),
        "gradients": _new(seen, (t for s, t in slots if s.kind == "grad")),
        "optimizer": _new(seen, optimizer_tensors(worker)),
    }
    found["other"] = _new(seen, (t for _, t in slots))
    return found


def measured_bytes(worker: Worker) -> dict[str, int]:
    """What is held, and `peak`: the most that the device, or on the CPU the process, had in use."""
    if worker.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(worker.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**held_bytes(worker), "peak": peak}


def largest(worker: Worker, num: int) -> list[tuple[str, int, str]]:
    """The largest live slots: name, bytes, and what their memory is for."""
    seen: set[int] = set()
    found = []
    for slot, value in zip(worker.me.slots, worker.slots, strict=True):
        size = _new(seen, [value])
        if size:
            memory = slot.memory if slot.kind != "shard" else "parameters"
            found.append((slot.name, size, str(memory)))
    return sorted(found, key=lambda f: -f[1])[:num]


def optimizer_tensors(worker: Worker, buckets: Iterable[int] | None = None) -> list[Tensor]:
    """Masters and optimizer state, without scalars such as the number of steps."""
    found: list[Tensor] = []
    for bucket, updater in worker.updaters.items():
        if buckets is None or bucket in buckets:
            found += [master.detach() for master in updater.masters]
            states: Any = updater.optimizer.state.values()
            found += [t for s in states for t in s.values() if isinstance(t, Tensor) and t.dim()]
    return found


def _new(seen: set[int], values: Iterable[Any]) -> int:
    """Bytes of the storages behind some tensors that were not seen before."""
    total = 0
    for value in values:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
    return total
