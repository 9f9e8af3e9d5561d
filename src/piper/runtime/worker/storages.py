"""Storages: what a worker really holds, measured on its live tensors, whatever the plan says of them."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from piper.plan.slots import LINGERING, MODEL

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker


def held_bytes(worker: Worker) -> dict[str, int]:
    """Bytes of parameters, gradients, optimizer state (with masters) and all else, each storage once."""
    seen: set[int] = set()
    slots = list(zip(worker.me.slots, worker.slots, strict=True))
    last = worker.steps.last or worker  # which has what the last step left of gradients
    left = zip(last.me.slots, last.slots, strict=True)
    pooled = [(worker.use[i], tensor) for i, tensor in worker.pooled.items()]
    found = {
        "parameters": _new(seen, (t for s, t in slots if s.kind in MODEL)),
        "gradients": _new(seen, (t for s, t in (*slots, *left) if s.kind in ("grad", *LINGERING)))
        + _new(seen, (t for use, t in pooled if use == "gradients")),
        "optimizer": _new(seen, optimizer_tensors(worker)),
    }
    found["other"] = _new(seen, (t for _, t in (*slots, *pooled)))
    return found


def measured_bytes(worker: Worker) -> dict[str, int]:
    """What is held, and `peak`: the most that the device, or on the CPU the process, had in use."""
    if worker.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(worker.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {**held_bytes(worker), "peak": peak}


def largest(worker: Worker, num: int) -> list[tuple[str, int, str]]:
    """The largest live Values: name, bytes, and what their memory is for."""
    return sorted(_held(worker), key=lambda f: -f[1])[:num]


def bytes_by_use(worker: Worker) -> dict[str, int]:
    """What all live memory is for, the most first."""
    found: Counter[str] = Counter()
    for _, size, use in _held(worker):
        found[use] += size
    return dict(found.most_common())


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a device or on the host."""
    text = str(error)
    return (
        isinstance(error, torch.OutOfMemoryError | MemoryError)
        or "DefaultCPUAllocator" in text
        or "CUDA error: out of memory" in text
    )


def optimizer_tensors(worker: Worker, buckets: Iterable[int] | None = None) -> list[Tensor]:
    """Masters, moving averages and optimizer state, without scalars such as the number of steps."""
    found: list[Tensor] = []
    for bucket, updater in worker.updaters.items():
        if buckets is None or bucket in buckets:
            found += [*updater.masters, *updater.averages]
            for optimizer in updater.optimizers.values():
                states: Any = optimizer.state.values()
                found += [
                    t for s in states for t in s.values() if isinstance(t, Tensor) and t.dim()
                ]
    return found


def _held(worker: Worker) -> Iterator[tuple[str, int, str]]:
    """Every storage once: who holds it, its bytes, and what for."""
    seen: set[int] = set()
    for slot, use, value in zip(worker.me.slots, worker.use, worker.slots, strict=True):
        size = _new(seen, [value])
        if size:
            yield slot.name, size, "parameters" if slot.kind in MODEL else use
    for bucket in worker.updaters:
        size = _new(seen, optimizer_tensors(worker, [bucket]))
        if size:
            yield f"optimizer state of {worker.plan.buckets[bucket].name}", size, "optimizer"


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
