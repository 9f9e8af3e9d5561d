"""Profile: what a rank did in one call, as a compressed Chrome trace."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile


def profiled(call: Callable[[], object], path: str) -> str:
    """Run a call under torch's profiler; `path` ends with .json.gz."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with profile(activities=activities) as found:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    found.export_chrome_trace(path)
    return path
