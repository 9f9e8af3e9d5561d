"""All ranks of a plan in this process, also of a plan that no Job made."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from piper.plan.types import Plan
from piper.runtime.launch.loopback_pool import LoopbackPool
from piper.runtime.launch.pool_run import PoolRun


def loopback(
    plan: Plan, bodies: Mapping[str, str], *, compile: bool = False, **options: Any
) -> PoolRun:
    return PoolRun(plan, bodies, partial(LoopbackPool, plan.mesh.size, **options), compile=compile)
