"""The functions of a rank's bodies: as they are, or compiled."""

from __future__ import annotations

from collections.abc import Mapping

from piper.bodies.files.codec import Function, load
from piper.plan.tasks import Calling
from piper.plan.types import RankPlan


def body_functions(
    me: RankPlan, bodies: Mapping[str, str], *, device: str, compile: bool
) -> dict[str, Function]:
    """By what each body that a rank runs is called."""
    if not compile:
        runs = (task for task in me.tasks if isinstance(task, Calling))
        return {task.body: load(bodies[task.body]) for task in runs}
    from piper.runtime.worker.compiling import compiled_functions

    return compiled_functions(me, bodies, device=device)
