"""prove: a plan in; all proofs over it, and a Report, or an error with a witness, out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from piper.check.parties import World, compressed
from piper.check.problem import Problem
from piper.check.proofs.acyclic import acyclic
from piper.check.proofs.bodies import bodies
from piper.check.proofs.cadences import cadences
from piper.check.proofs.collectives import collectives
from piper.check.proofs.events import events
from piper.check.proofs.frame import frame
from piper.check.proofs.gathers import gathers
from piper.check.proofs.labels import labels
from piper.check.proofs.limit import limit, peaks
from piper.check.proofs.memory import memory
from piper.check.proofs.messages import messages
from piper.check.proofs.norms import norms
from piper.check.proofs.numbers import numbers
from piper.check.proofs.pools import pools
from piper.check.proofs.resident import resident
from piper.check.proofs.runs_again import runs_again
from piper.check.proofs.state_changes import state_changes
from piper.check.proofs.structure import structure
from piper.check.proofs.tensor_layouts import tensor_layouts
from piper.check.proofs.turns import turns
from piper.check.proofs.updates import updates
from piper.check.report import Report
from piper.errors import CheckError
from piper.plan.tasks import Comm, Update, sends
from piper.plan.types import Plan

Proof = Callable[[World], Iterator[Problem]]

PROOFS: dict[str, tuple[Proof, ...]] = {
    "messages": (messages,),
    "collectives": (collectives,),
    "acyclic": (acyclic,),
    "resident": (resident,),
    "gathers": (gathers,),
    "memory": (memory,),
    "events": (events,),
    "updates": (updates, norms, numbers, cadences),
    "state": (state_changes,),
    "pools": (pools,),
    "bodies": (bodies,),
    "layouts": (tensor_layouts,),
    "again": (runs_again,),
    "turns": (turns,),
    "labels": (labels,),
}
_MORE = 3  # further problems that an error mentions


def check_plan(plan: Plan, *, memory_limit: int | None = None) -> Report:
    """Prove a plan, over two consecutive steps; raises CheckError with a witness of what fails.

    Proved of every rank: messages and collectives meet in one order; nobody waits in a circle;
    every read, overwrite and free is ordered after what it needs; no slot is read before it is
    written or after it is freed, freed twice, reused early or leaked; every parameter is updated
    once, by its whole gradient, and read no more in that step; every buffer that changes does so
    once per microbatch, in their order, by what all data ranks have left for it; slots that share
    memory take turns; where tensors are cut, every collective leads from one layout to the other
    and every body reads what it was traced for; what runs again is given what it was given first;
    and, with `memory_limit` in bytes, no rank needs more at its peak.
    """
    start = time.perf_counter()
    world = compressed(plan)
    _refuse(problems(world, memory_limit=memory_limit), plan)
    tasks = [task for party in world.parties for task in party.tasks]
    return Report(
        num_parties=len(world.parties),
        num_tasks=len(tasks),
        num_messages=sum(map(sends, tasks)),
        num_collectives=sum(isinstance(t, Comm) and not t.facts.is_message for t in tasks),
        num_slots=sum(len(party.slots) for party in world.parties),
        num_updates=sum(isinstance(task, Update) for task in tasks),
        seconds=time.perf_counter() - start,
        peaks=peaks(world),
    )


def check_names(plan: Plan) -> None:
    """Raise CheckError if a number in a plan names nothing, or cannot be; nothing else is proved."""
    _refuse(_nameless(compressed(plan)), plan)


def _refuse(found: list[Problem], plan: Plan) -> None:
    if not found:
        return
    first, rest = found[0], found[1:]
    more = [f"also {p.proof}: {p.message}" for p in rest[:_MORE]]
    if len(rest) > _MORE:
        more.append(f"and {len(rest) - _MORE} more")
    raise CheckError(
        f"{first.proof}: {first.message}",
        details=[*first.witness, *more],
        legal=_more_memory(plan) if first.proof == "limit" else "",
    )


def _more_memory(plan: Plan) -> str:
    """What a user can still do about a limit. What was tried of computing again is a plan's own choice,
    which leaves layers whole that communicate."""
    said = {record.directive.kind for record in plan.history}
    again = "recompute(...), "
    if any(cadence.again for cadence in plan.cadences):
        communicates = not said.isdisjoint({"shard", "shard_tensor"})
        again = "recompute(where()), which runs whole layers again, " if communicates else ""
    return f"replicate(zero=...), {again}smaller microbatches, or a higher limit"


def _nameless(world: World) -> list[Problem]:
    found = dict.fromkeys(frame(world.plan))
    return list(found or dict.fromkeys(structure(world)))


def problems(plan: Plan | World, *, memory_limit: int | None = None) -> list[Problem]:
    """All that is wrong with a plan, or with parties made of one, in the order of the proofs."""
    world = compressed(plan) if isinstance(plan, Plan) else plan
    nameless = _nameless(world)
    if nameless:  # nothing else can be said of it
        return nameless
    found: dict[Problem, None] = {}
    for proofs in PROOFS.values():
        for proof in proofs:
            found.update(dict.fromkeys(proof(world)))
    found.update(dict.fromkeys(limit(world, memory_limit)))
    return list(found)
