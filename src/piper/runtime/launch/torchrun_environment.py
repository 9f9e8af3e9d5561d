"""Torchrun's environment: whether this process is one of its ranks, asked without torch."""

from __future__ import annotations

import os

NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def under_torchrun() -> bool:
    """Whether this process is a rank that torchrun, or something like it, started."""
    return all(name in os.environ for name in NEEDED)
