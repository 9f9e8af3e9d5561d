"""state: every buffer that forwards change gets its next content once per microbatch, in their order.

What a Fold takes comes from the forward of its own microbatch and, where several ranks share the batch,
from all of them, so that copies of a buffer stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World, normal
from piper.check.problem import Problem, problem
from piper.mesh import Group
from piper.plan.tasks import Fold, Run, gathers


def state_changes(world: World) -> Iterator[Problem]:
    """Changes that are missing, doubled, in another order, or by what not all data ranks have left."""
    changing = {name for name, tensor in world.plan.tensors.items() if tensor.changes}
    held = {s.source for party in world.parties for s in party.slots if s.kind == "buffer"}
    for name in sorted(changing - held if world.plan.train else ()):
        yield Problem("state", f"{name} changes, but nobody holds it")
    for party in world.distinct:
        yield from _times(world, party)
        for index, task in enumerate(party.tasks):
            if isinstance(task, Fold):
                yield from _taken(world, party, index, task)


def _times(world: World, party: Party) -> Iterator[Problem]:
    plan = world.plan
    folds: dict[int, list[int]] = {}  # buffer -> its Folds, in dispatch order
    for index, task in enumerate(party.tasks):
        for slot in task.writes if isinstance(task, Fold) else ():
            folds.setdefault(slot, []).append(index)
        for slot in task.writes:
            if party.slots[slot].kind == "buffer" and not isinstance(task, Fold):
                text = f"{task.name} writes the buffer {party.slots[slot].name}"
                yield problem(world, "state", text, (party, index))
    for number, held in enumerate(party.slots):
        mine = folds.get(number, [])
        tensor = plan.tensors.get(held.source) if held.kind == "buffer" else None
        changes = tensor is not None and tensor.changes and plan.train
        wanted = plan.num_microbatches if changes else 0
        if len(mine) != wanted:
            text = f"{held.name} gets its next content {len(mine)} times in a step, not {wanted}"
            yield problem(world, "state", f"{party.label}: {text}", *((party, i) for i in mine[:2]))
        tags = [party.tasks[i].tags for i in mine]
        if tags != sorted(set(tags)):
            text = f"{held.name} does not change in the order of microbatches"
            yield problem(world, "state", text, *((party, i) for i in mine[:2]))


def _taken(world: World, party: Party, index: int, task: Fold) -> Iterator[Problem]:
    plan, local = world.plan, world.local(party)
    if task.inputs[: len(task.outputs)] != task.outputs:
        yield problem(
            world, "state", f"{task.name} changes other buffers than it reads", (party, index)
        )
    all_ranks = normal(plan, Group((party.slice,), plan.data_axes))
    for slot in task.inputs[len(task.outputs) :]:
        by = local.writer_before(slot, index)
        maker = party.tasks[by] if by >= 0 else None
        if all_ranks.size(plan.mesh) > 1:
            if not gathers(maker) or world.group(maker) != all_ranks:
                name = party.slots[slot].name
                text = f"{task.name} takes {name}, which is not of all data ranks"
                yield problem(world, "state", text, (party, index))
                continue
            by = local.writer_before(maker.source, by)
            maker = party.tasks[by] if by >= 0 else None
        if not isinstance(maker, Run) or maker.phase != "F" or maker.tags != task.tags:
            text = f"{task.name} takes what no forward of its microbatch has left"
            yield problem(world, "state", text, (party, index))
