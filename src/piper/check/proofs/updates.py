"""updates: every parameter is stepped once, by its whole gradient, on every rank that holds it."""

from __future__ import annotations

from collections.abc import Iterator

from piper.check.parties import Party, World, normal
from piper.check.problem import Problem, problem
from piper.check.proofs.gradient_sums import sums
from piper.check.proofs.numbers import whole
from piper.ir.layouts import local
from piper.mesh import Group
from piper.plan.slots import SUMS, Slot
from piper.plan.tasks import (
    Add,
    Comm,
    Run,
    Stepping,
    Task,
    Update,
    gathers,
    reduces,
    scatters,
)
from piper.plan.types import Bucket


def updates(world: World) -> Iterator[Problem]:
    """Buckets that do not fit their parameters; gradients that are not whole; updates and gathers
    that are missing or doubled."""
    yield from _buckets(world)
    yield from sums(world)
    for party in world.distinct:
        for index, task in enumerate(party.tasks if not world.plan.train else ()):
            if isinstance(task, Stepping) or (isinstance(task, Run) and task.phase != "F"):
                text = f"{task.name} has no place in an evaluation, which changes nothing"
                yield problem(world, "updates", text, (party, index))
        for number, bucket in world.trained_at(party.slice):
            yield from _Chain(world, party, number, bucket).run()


def _buckets(world: World) -> Iterator[Problem]:
    """Buckets hold each trainable parameter once, on all slices and axes where it is."""
    plan = world.plan
    sizes = dict(plan.mesh.axes)
    home: dict[str, int] = {}
    for number, bucket in enumerate(plan.buckets):
        for name in bucket.params:
            if name in home:
                yield Problem("updates", f"{name} is in two buckets")
            home[name] = number
        for name, shape in zip(bucket.params, bucket.shapes, strict=True):
            tensor = plan.tensors[name]
            part = local(tensor.type, tensor.cut, plan.mesh).shape
            if part != shape:
                text = f"bucket {bucket.name} has {shape} of {name}, of which a rank has {part}"
                yield Problem("updates", text)
            cutting = {axis for axis, _ in plan.tensors[name].cut if sizes[axis] > 1}
            if cutting != {
                axis for axis, _ in plan.tensors[bucket.params[0]].cut if sizes[axis] > 1
            }:
                text = f"bucket {bucket.name} has {name}, which other axes cut than the rest"
                yield Problem("updates", text)
        for at in bucket.slices:
            free = {a for a in plan.mesh.free(at) if sizes[a] > 1}
            cut = [axis for axis, _ in plan.tensors[bucket.params[0]].cut]
            whole = (*bucket.over, *bucket.copies, *bucket.same)
            axes = [a for a in (*whole, *dict.fromkeys(cut)) if a in free]
            if sorted(axes) != sorted(free):
                text = f"bucket {bucket.name} is whole along {', '.join(axes)} only"
                yield Problem("updates", text, (), (f"{at} has axes {', '.join(sorted(free))}",))
        if any(plan.tensors[name].trainable != bucket.trained for name in bucket.params):
            text = f"bucket {bucket.name} is trained, or is not, where its parameters are otherwise"
            yield Problem("updates", text)
    for name, tensor in plan.tensors.items():
        if tensor.trainable and name not in home:
            yield Problem("updates", f"{name} is trained, but in no bucket: it is never updated")
    for party in world.distinct:
        for slot in party.slots:
            if slot.kind != "param" or slot.source not in home:
                continue
            bucket = plan.buckets[home[slot.source]]
            place = bucket.params.index(slot.source)
            if party.slice not in bucket.slices:
                text = f"{party.label} holds {slot.source}, its bucket {bucket.name} is elsewhere"
                yield Problem("updates", text)
            elif not _lies_right(party, slot, home, bucket):
                text = f"{party.label}: {slot.name} is not as bucket {bucket.name} has it"
                yield Problem("updates", text)
            elif slot.base >= 0 and slot.offset != bucket.offsets[place]:
                text = f"{party.label}: {slot.name} is not where bucket {bucket.name} has it"
                yield Problem("updates", text)


def _lies_right(party: Party, slot: Slot, home: dict[str, int], bucket: Bucket) -> bool:
    """A parameter lies in what its bucket keeps, or is gathered into; alone where nothing is cut."""
    if slot.base < 0:
        return not bucket.over
    base = party.slots[slot.base]
    return base.kind in ("flat", "gathered") and base.bucket == home[slot.source]


class _Chain:
    """From the contributions to one bucket's gradient to its updated parameters, on one party."""

    def __init__(self, world: World, party: Party, number: int, bucket: Bucket) -> None:
        self.world = world
        self.party = party
        self.number = number
        self.bucket = bucket
        self.local = world.local(party)
        self.parts = world.plan.mesh.size_of(bucket.over)
        self.num_tasks = len(party.tasks)
        self.own = [
            i
            for i, task in enumerate(party.tasks)
            if isinstance(task, Stepping) and task.bucket == number
        ]

    def run(self) -> Iterator[Problem]:
        stepped = [i for i in self.own if isinstance(self.party.tasks[i], Update)]
        what = f"bucket {self.bucket.name} ({', '.join(self.bucket.params)})"
        if len(stepped) != 1:
            times = f"{len(stepped)} times" if stepped else "never"
            text = f"{self.party.label}: {what} is updated {times} in a step"
            yield self._problem(text, *(stepped or self._gradient_tasks()))
            return
        (index,) = stepped
        task = self.party.tasks[index]
        assert isinstance(task, Update)
        wrong = [problem for own in self.own for problem in self._targets(own, what)]
        yield from wrong
        if wrong:
            return
        yield from self._gradient(index, task.gradient)
        yield from self._gather(index, task)

    def _gradient_tasks(self) -> list[int]:
        """The last task that wrote the bucket's gradient, for want of an update."""
        last = [
            [i for i in self.local.written_by(s) if i not in self.own]
            for s, slot in enumerate(self.party.slots)
            if slot.kind == "grad" and slot.bucket == self.number
        ]
        return [found[-1] for found in last if found][-1:]

    def _targets(self, index: int, what: str) -> Iterator[Problem]:
        """It steps all parameters of its bucket, or the rank's shard of them, by its gradient."""
        task = self.party.tasks[index]
        assert isinstance(task, Stepping)
        stepped = [self.party.slots[s] for s in task.stepped]
        if not self.bucket.over:
            right = tuple(s.source for s in stepped if s.kind == "param") == self.bucket.params
        else:
            right = [(s.kind, s.bucket) for s in stepped] == [("shard", self.number)]
        if not right:
            names = ", ".join(slot.name for slot in stepped)
            text = f"{task.name} steps {names}, not what bucket {self.bucket.name} holds"
            yield self._problem(text, index)
        gradient = self.party.slots[task.gradient]
        if gradient.kind != "grad" or gradient.bucket != self.number:
            text = f"{task.name} steps {what} by {gradient.name}, which is not its gradient"
            yield self._problem(text, index)

    def _gradient(self, update: int, grad: int) -> Iterator[Problem]:
        """All contributions, then the sum over copies, then the update."""
        name = self.party.slots[grad].name
        group = normal(self.world.plan, Group(self.bucket.slices, self.bucket.copies))
        reduced: list[int] = []
        scattered: list[int] = []
        written_by = self.local.written_by(grad)
        for index in written_by:
            task = self.party.tasks[index]
            if index in self.own:
                continue
            if reduces(task) and grad == task.source:
                reduced.append(index)
                if self.world.group(task) != group:
                    text = f"{task.name} reduces {name} over {self.world.group(task)}"
                    yield self._problem(text, index, facts=(f"its copies are {group}",))
                if index > update:
                    text = f"{task.name} reduces {name} after its update"
                    yield self._problem(text, index, update)
            elif isinstance(task, Add) and self._reduction(index, task) >= 0:
                reduced.append(index)
                yield from self._cast_back(index, task, grad, group)
                if index > update:
                    text = f"{task.name} reduces {name} after its update"
                    yield self._problem(text, index, update)
            elif isinstance(task, Add) or scatters(task):
                for end in (*reduced[:1], update):
                    if index > end:
                        text = f"{task.name} adds to {name} after {self.party.tasks[end].name}"
                        yield self._problem(f"{text}: it is lost", index, end)
                        break
                yield from self._contribution(index, task, name)
                scattered += [index] * scatters(task)
            else:
                yield self._problem(f"{task.name} overwrites {name}", index)
        for found in (reduced, scattered):
            if len(found) > 1:
                yield self._problem(f"{name} is reduced {len(found)} times", *found)
        if not reduced and group.size(self.world.plan.mesh) > 1:
            text = f"{self.party.label}: {name} is not reduced over its copies, {group}"
            yield self._problem(text, update)
        if not any(i < update for i in written_by):
            yield self._problem(f"nothing is added to {name} before its update", update)

    def _reduction(self, index: int, task: Add) -> int:
        """The task that has reduced what is added, over copies and in the wire's own dtype; else -1."""
        makers = [self.local.writer_before(slot, index) for slot in task.terms]
        own = self.bucket.wire != self.bucket.sums
        return next((by for by in makers if own and by >= 0 and reduces(self.party.tasks[by])), -1)

    def _cast_back(self, index: int, task: Add, grad: int, group: Group) -> Iterator[Problem]:
        """All of a gradient was cast, reduced over its copies, and takes the gradient's place."""
        name = self.party.slots[grad].name
        by = self._reduction(index, task)
        comm = self.party.tasks[by]
        assert isinstance(comm, Comm)
        if not whole(task):
            yield self._problem(f"{task.name} adds to {name} what is reduced already", index, by)
        if self.world.group(comm) != group:
            text = f"{comm.name} reduces {name} over {self.world.group(comm)}"
            yield self._problem(text, by, facts=(f"its copies are {group}",))
        cast = self.local.writer_before(comm.source, by)
        if cast < 0 or self.party.tasks[cast].reads != (grad,):
            yield self._problem(f"{comm.name} does not reduce {name}", by, index)
        yield from self._complete(by, comm)

    def _complete(self, index: int, comm: Comm) -> Iterator[Problem]:
        """A reduction takes all of a sum: nothing is added to that behind it, or behind its cast."""
        source = self.local.root[comm.source]
        if self.bucket.wire != self.bucket.sums:
            by = self.local.writer_before(source, index)
            cast = self.party.tasks[by] if by >= 0 else None
            what = self.party.slots[source].name
            if not (isinstance(cast, Add) and whole(cast)):
                text = f"{comm.name} reduces {what}, which is not the cast of a sum"
                yield self._problem(text, index, *([by] if by >= 0 else ()))
                return
            yield from self._nothing_behind(index, source)
            source, index = self.local.root[cast.terms[0]], by
            known = self.party.slots[source]
            if known.bucket != self.number or known.kind not in (*SUMS, "grad"):
                text = f"{cast.name} casts {known.name}, which is no sum of {self.bucket.name}"
                yield self._problem(text, index)
        yield from self._nothing_behind(index, source)

    def _nothing_behind(self, index: int, source: int) -> Iterator[Problem]:
        """No task adds to a sum, or takes it, after one has, until it is started again; and before it
        tasks only add to it."""
        task, name, end = self.party.tasks[index], self.party.slots[source].name, self.num_tasks
        for earlier in self.local.written_by(source):
            if earlier < index and not isinstance(self.party.tasks[earlier], Add):
                text = (
                    f"{self.party.tasks[earlier].name} changes {name} before {task.name} takes it"
                )
                yield self._problem(text, earlier, index)
        for later in self.local.written_by(source):
            if later > index:
                add = self.party.tasks[later]
                if not isinstance(add, Add) or all(add.first):
                    end = later
                    break
                text = f"{add.name} adds to {name} after {task.name}"
                yield self._problem(f"{text}: it is lost, or counts twice", later, index)
        for reader in self.local.readers.get(source, []):
            if index < reader < end and source in self.party.tasks[reader].reads:
                text = f"{self.party.tasks[reader].name} takes {name} after {task.name}"
                yield self._problem(f"{text}: it counts twice", reader, index)

    def _contribution(self, index: int, task: Task, name: str) -> Iterator[Problem]:
        """With sharded gradients, what enters is reduced over the shards' ranks; else, nothing is."""
        if scatters(task):
            yield from self._scattered(index, name)
            return
        for slot in task.reads:
            by = self.local.writer_before(slot, index)
            maker = self.party.tasks[by] if by >= 0 else None
            if self.parts > 1 and self.party.slots[slot].bucket != self.number:
                text = f"{task.name} adds a part of another bucket to {name}"
                yield self._problem(text, index)
            if self.parts > 1 and scatters(maker):
                yield from self._scattered(by, name)
            elif self.parts > 1:
                made = self.party.slots[slot].name
                text = f"{task.name} adds {made} to {name} before it is reduced over its shards"
                yield self._problem(text, index, *([by] if by >= 0 else ()))
            elif isinstance(maker, Comm) and maker.facts.alike and not maker.facts.is_message:
                text = f"{task.name} adds to {name} what is reduced already"
                yield self._problem(text, index, by)

    def _scattered(self, index: int, name: str) -> Iterator[Problem]:
        """A reduce_scatter takes all of a sum, once, over the right ranks."""
        task = self.party.tasks[index]
        assert isinstance(task, Comm)
        source = self.local.root[task.source]
        group = normal(self.world.plan, Group((self.party.slice,), self.bucket.over))
        if self.world.group(task) != group:
            text = f"{task.name} reduces {name} over {self.world.group(task)}"
            yield self._problem(text, index, facts=(f"it is cut into shards over {group}",))
        if self.party.slots[source].bucket != self.number:
            text = f"{task.name} reduces {self.party.slots[source].name} into {name}"
            yield self._problem(text, index)
        yield from self._complete(index, task)

    def _gather(self, update: int, stepping: Update) -> Iterator[Problem]:
        """Parameters that all ranks hold whole are gathered again once their shards are stepped."""
        shard = stepping.stepped[0]
        if self.party.slots[shard].base < 0:
            return
        last = self.own[-1]
        group = normal(self.world.plan, Group((self.party.slice,), self.bucket.over))
        flat = self.local.root[shard]
        found = []
        for index in self.local.writers.get(flat, []):
            task = self.party.tasks[index]
            if not gathers(task):
                continue
            found.append(index)
            if self.world.group(task) != group or shard != task.source:
                text = f"{task.name} gathers {self.party.slots[flat].name} over "
                text += f"{self.world.group(task)}"
                yield self._problem(text, index, facts=(f"its shards are on {group}",))
            if index < last:
                text = f"{task.name} gathers before {self.party.tasks[last].name}"
                yield self._problem(f"{text}: replicas drift apart", index, last)
        if not found:
            text = f"{self.party.label}: the shards of bucket {self.bucket.name} are not gathered"
            yield self._problem(f"{text} after their update: replicas drift apart", update)

    def _problem(self, text: str, *tasks: int, facts: tuple[str, ...] = ()) -> Problem:
        found = ((self.party, t) for t in tasks)
        return problem(self.world, "updates", text, *found, facts=facts)
