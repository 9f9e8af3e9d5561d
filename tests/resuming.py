"""What tests of resuming have in common: a run that is saved, and goes on under another job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from piper.api.job import Job
from piper.api.run import Run

Launched = tuple[Job, Any]  # and its launcher


def state_of(run: Run) -> dict[str, torch.Tensor]:
    """Masters and what optimizers keep, on the CPU."""
    kept = {f"{n}:{k}": t for n, pieces in run.optimizer_state().items() for k, t in pieces.items()}
    return {name: tensor.cpu() for name, tensor in {**run.masters(), **kept}.items()}


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def losses_across_a_stop(
    before: Launched, after: Launched, batches: Sequence[Any], folder: Path
) -> list[float]:
    """Half of the batches, a save, and the other half; the state comes back bit for bit."""
    half = len(batches) // 2
    job, launcher = before
    with job.launch(launcher) as run:
        losses = [run.step(batch).loss for batch in batches[:half]]
        run.save(folder)
        kept = state_of(run)
    job, launcher = after
    with job.resume(folder, launcher) as run:
        assert same(state_of(run), kept)
        return losses + [run.step(batch).loss for batch in batches[half:]]
