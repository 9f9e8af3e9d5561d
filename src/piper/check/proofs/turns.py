"""turns: no more microbatches are, at once, than was chosen to save memory."""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import World
from piper.check.problem import Problem, problem
from piper.plan.cadence import under_way
from piper.plan.under_way import most_under_way


def turns(world: World) -> Iterator[Problem]:
    """A body with which one more begins."""
    for chosen in {cadence.under_way for cadence in world.plan.cadences} - {0}:
        for party in world.distinct:
            found, at = most_under_way(party.tasks, world.split_tags)
            if found > chosen:
                text = f"{party.tasks[at].name} begins when {found - 1} others are under way"
                yield problem(world, "turns", f"{text}, but {under_way(chosen)}", (party, at))
