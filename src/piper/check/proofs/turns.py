"""turns: each microbatch is over before the next one begins, where that was chosen to save memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from piper.check.parties import World
from piper.check.problem import Problem, problem
from piper.plan.tasks import Run, microbatch_of


def turns(world: World) -> Iterator[Problem]:
    """A chunk that runs behind one of a later microbatch."""
    if not any(cadence.in_turn for cadence in world.plan.cadences):
        return
    for party in world.distinct:
        runs = [(i, task) for i, task in enumerate(party.tasks) if isinstance(task, Run)]
        for (at, one), (behind, other) in pairwise(runs):
            if microbatch_of(other, world.split_tags) < microbatch_of(one, world.split_tags):
                text = f"{other.name} runs behind {one.name}, but microbatches are to take turns"
                yield problem(world, "turns", text, (party, at), (party, behind))
