"""Torch trace: what torch's profiler sees of a rank's step, as a compressed Chrome trace."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
from torch.profiler import ProfilerActivity, profile


@contextlib.contextmanager
def profiled(folder: str | None, rank: int) -> Iterator[None]:
    """Write what torch's profiler sees to `rank0.json.gz` in a folder; without one, do nothing."""
    if folder is None:
        yield
        return
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    os.makedirs(folder, exist_ok=True)
    with profile(activities=activities) as found:
        yield
    found.export_chrome_trace(os.path.join(folder, f"rank{rank}.json.gz"))
