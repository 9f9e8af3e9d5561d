"""The functions of a rank's bodies: as they are, or compiled."""

from __future__ import annotations

from collections.abc import Mapping

from piper.bodies.files.codec import Function, load
from piper.bodies.products import Added
from piper.plan.summed_inside import Part
from piper.plan.tasks import Calling
from piper.plan.types import RankPlan

Functions = Mapping[tuple[str, Added], Function]


def body_functions(
    me: RankPlan,
    bodies: Mapping[str, str],
    summed: Mapping[int, Part],
    *,
    device: str,
    compile: bool,
) -> Functions:
    """By what each body that a rank runs is called, and the results that it adds to sums."""
    if not compile:
        runs = (task for task in me.tasks if isinstance(task, Calling))
        calls = {(task.body, added_by(task, summed)) for task in runs}
        return {(body, added): load(bodies[body], added) for body, added in calls}
    from piper.runtime.worker.compiling import compiled_functions

    return compiled_functions(me, bodies, summed, device=device)


def added_by(task: Calling, summed: Mapping[int, Part]) -> Added:
    """The results that a task's body adds to sums, and whether each starts its sum."""
    pairs = enumerate(task.outputs)
    return tuple((place, summed[slot].first) for place, slot in pairs if slot in summed)
