"""Launchers: a name and a plan in, the Pool that runs the plan out; a new launcher is a row here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from piper.errors import RunError, did_you_mean
from piper.plan.types import Plan
from piper.runtime.launch.in_process import SinglePool
from piper.runtime.launch.local_pool import LocalPool
from piper.runtime.launch.loopback_pool import LoopbackPool
from piper.runtime.launch.pool import Pool
from piper.runtime.launch.ray.ray_pool import RayPool
from piper.runtime.launch.reading import refuse_launch_while_importing
from piper.runtime.launch.torchrun import TorchrunPool


@dataclass(frozen=True)
class Launcher:
    """A kind of Pool, which takes a number of ranks, a device and these options; with `by_mesh` also
    the mesh, to place ranks by it."""

    pool: Callable[..., Pool]
    options: tuple[str, ...] = ()
    by_mesh: bool = False


LAUNCHERS = {
    "local": Launcher(LocalPool, ("timeout", "ranks_per_gpu", "report")),
    "torchrun": Launcher(TorchrunPool, ("timeout",)),
    "ray": Launcher(
        RayPool, ("timeout", "address", "near", "spread", "num_cpus", "report"), by_mesh=True
    ),
    "loopback": Launcher(LoopbackPool, ("adversary", "seed", "observe")),
    "single": Launcher(SinglePool),
}


def pool_of(
    launcher: str | Pool, plan: Plan, options: Mapping[str, Any]
) -> Pool | Callable[[], Pool]:
    """The pool that was given, or how to make one for a plan. `compile` is an option of every run."""
    refuse_launch_while_importing()
    if isinstance(launcher, str) and launcher not in LAUNCHERS:
        raise RunError(f"no launcher is called {launcher!r}", legal=", ".join(LAUNCHERS))
    kind = LAUNCHERS[launcher] if isinstance(launcher, str) else None
    legal = (*(kind.options if kind else ()), "compile")
    for option in options:
        if option not in legal:
            raise RunError(
                f"launch takes no {option} here{did_you_mean(option, legal)}",
                legal=", ".join(legal),
            )
    if kind is None:
        assert not isinstance(launcher, str)
        return launcher
    more = {name: value for name, value in options.items() if name != "compile"}
    if kind.by_mesh:
        more["mesh"] = plan.mesh
    return partial(kind.pool, plan.mesh.size, device=plan.device, **more)
