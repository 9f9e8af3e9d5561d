"""What a step leaves to be told, which its device copies: the host need not wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from piper.runtime.worker.handlers import check_count

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker


class StepResults:
    """Of the step that a Worker has just dispatched, on the stream that it ends on; the next step may
    begin before they are read."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.number = worker.steps.begun
        self._found = {name: _copied(worker.slots[i]) for name, i in worker.me.results.items()}
        self._made: torch.cuda.Event | None = None
        if worker.device.type == "cuda":
            self._made = torch.cuda.Event()
            self._made.record()

    def get(self) -> dict[str, Any]:
        """The loss, the count and the metrics of the whole batch, or rows of predictions."""
        if self._made is not None:
            self._made.synchronize()
        found: dict[str, Any] = {
            name: value if name.startswith("prediction.") else value.tolist()
            for name, value in self._found.items()
        }
        plan = self.worker.plan
        found.setdefault("count", float(plan.num_data_ranks * plan.num_microbatches))
        check_count(found["count"])
        found |= self.worker.guard.end()
        self.worker.steps.finished = self.number - found.get("skipped", False)
        return found


def _copied(tensor: Tensor) -> Tensor:
    """On the CPU, at the latest when the device has come so far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
