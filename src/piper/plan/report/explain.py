"""explain: a plan and the name of a task in, what there is to know about that task out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from piper.ir.form.byte_sizes import show_size
from piper.mesh import Slice
from piper.plan.report.find import find_tasks
from piper.plan.report.reasons import Reasons
from piper.plan.report.summary import alive_bytes, peak_bytes, slot_bytes
from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Meeting, Run, Task
from piper.plan.types import Plan, RankClass

_SHOWN = 12


def explain(plan: Plan, name: str) -> str:
    """The task of this name (or start, or end of a name) on each class of ranks that has it."""
    return "\n".join(
        "\n".join(_Explained(plan, found, index).lines()) for found, index in find_tasks(plan, name)
    )


class _Explained:
    """One task of one class."""

    def __init__(self, plan: Plan, found: RankClass, index: int) -> None:
        self.plan = plan
        self.found = found
        self.index = index
        self.task = found.tasks[index]
        self.reasons = Reasons(found)

    def lines(self) -> Iterator[str]:
        task, total = self.task, len(self.found.tasks)
        yield task.name
        yield f"  kind     {task.kind} on stream {self._stream(task)}, task {self.index} of {total}"
        yield f"  class    {slice_text(self.plan, self.found)}"
        yield f"  from     {self._origin()}"
        if isinstance(task, Meeting):
            yield from self._group(task)
        if isinstance(task, Run) and task.leaves:
            yield f"  leaves   {task.leaves} multiprocessors to the communication beside it"
        yield from self._slots("reads", task.reads)
        yield from self._slots("writes", task.writes)
        yield from self._slots("frees", task.frees)
        yield from self._before()
        yield from self._after()
        yield from self._overlaps()
        before, during, after = next(islice(alive_bytes(self.found), self.index, None))
        yield (
            f"  Values   {show_size(before)} alive before it, {show_size(during)} during, "
            f"{show_size(after)} after; the most on this rank is {show_size(peak_bytes(self.found))}"
        )

    def _stream(self, task: Task) -> str:
        return self.plan.streams[task.stream].name

    def _origin(self) -> str:
        if not 0 <= self.task.origin < len(self.plan.history):
            return "the traced program; no directive made it"
        record = self.plan.history[self.task.origin]
        source = f"{record.asked_by}; " if record.asked_by else ""
        return f"{record}  ({source}it {record.effect})"

    def _group(self, task: Meeting) -> Iterator[str]:
        yield f"  group    {group_text(self.plan, self.found, task)}"
        if isinstance(task, Comm) and task.key:
            yield f"  key      {task.key}"
            yield from self._peers(task.key)

    def _peers(self, key: str) -> Iterator[str]:
        """The other ends, on other classes of ranks."""
        for other in self.plan.classes:
            for index, task in enumerate(other.tasks):
                if isinstance(task, Comm) and task.key == key and other is not self.found:
                    yield f"  meets    {task.name} at {other.slice}, task {index} there"

    def _slots(self, what: str, slots: tuple[int, ...]) -> Iterator[str]:
        known = [self.found.slots[slot] for slot in dict.fromkeys(slots)]
        for position, slot in enumerate(known[:_SHOWN]):
            yield f"  {what if not position else '':<8} {_slot(slot)}"
        rest = known[_SHOWN:]
        if rest:
            yield f"  {'':<8} and {len(rest)} more, {show_size(sum(map(slot_bytes, rest)))}"

    def _before(self) -> Iterator[str]:
        tasks, task = self.found.tasks, self.task
        same = [i for i in range(self.index) if tasks[i].stream == task.stream]
        needed = [i for i in self.reasons.needed(self.index) if i not in task.waits]
        lines = [self._line(i, self.reasons.why(i, self.index)) for i in task.waits]
        if same:
            why = self.reasons.why(same[-1], self.index) if same[-1] in needed else ""
            lines.append(self._line(same[-1], _joined("before it on its stream", why)))
        for before in needed:
            if not same or before != same[-1]:
                why = self.reasons.why(before, self.index)
                lines.append(self._line(before, f"{why}; no wait: {self._sure(before)}"))
        yield from _listed("after", lines)

    def _sure(self, before: int) -> str:
        """Why a task need not wait for an earlier one."""
        task = self.found.tasks[before]
        if task.stream == self.task.stream:
            return "same stream"
        if task.blocks:
            return "the host dispatches nothing before it has read"
        return "what it waits for had waited for it"

    def _after(self) -> Iterator[str]:
        tasks = self.found.tasks
        lines, following = [], None
        for later in range(self.index + 1, len(tasks)):
            if following is None and tasks[later].stream == self.task.stream:
                following = later
            if self.index in tasks[later].waits:
                lines.append(self._line(later, self.reasons.why(self.index, later)))
            elif self.index in self.reasons.needed(later):
                why = self.reasons.why(self.index, later)
                lines.append(self._line(later, f"{why}; needs no wait"))
        if following is not None:
            lines.append(self._line(following, "next on its stream"))
        yield from _listed("before", lines)

    def _overlaps(self) -> Iterator[str]:
        for group in self.found.overlaps:
            if self.index in group:
                names = [self.found.tasks[i].name for i in group]
                yield from _listed("overlap", names, all_of_them=True)

    def _line(self, index: int, why: str) -> str:
        task = self.found.tasks[index]
        return f"{task.name} ({self._stream(task)}): {why}"


def slice_text(plan: Plan, found: RankClass) -> str:
    """`pp=0 (ranks 0-3)`."""
    mesh, at = plan.mesh, found.slice
    num_ranks = mesh.size_of(mesh.free(at))
    word = "rank" if num_ranks == 1 else "ranks"
    return f"{at} ({word} {_first_ranks(mesh.ranks(at), num_ranks)})"


def group_text(plan: Plan, found: RankClass, task: Meeting) -> str:
    """The group of a task, and which ranks of its class meet whom."""
    group, mesh = plan.groups[task.group], plan.mesh
    free = mesh.free(found.slice)
    if isinstance(task, Comm) and task.facts.is_message:
        arrow = "->" if task.facts.sends else "<-"
        num = mesh.size_of(free)
        ranks = list(islice(mesh.ranks(found.slice), _SHOWN))
        pairs = [(r, *(m for m in group.ranks(mesh, r) if m != r)) for r in ranks]
        shown = [f"{rank} {arrow} {_ranks(peers)}" for rank, *peers in pairs]
    else:
        inside = tuple(axis for axis in group.over if axis in free)
        num = mesh.size_of(free) // mesh.size_of(inside)
        firsts = Slice((*found.slice.fixed, *((axis, 0) for axis in inside)))
        ranks = list(islice(mesh.ranks(firsts), _SHOWN))
        shown = [_ranks(group.ranks(mesh, rank)) for rank in ranks]
    more = [f"{num - _SHOWN} more"] if num > _SHOWN else []
    return f"{group}: ranks {' | '.join([*shown, *more])}"


def _joined(first: str, second: str) -> str:
    return f"{first}; {second}" if second else first


def _listed(what: str, lines: list[str], *, all_of_them: bool = False) -> Iterator[str]:
    shown = lines if all_of_them else lines[:_SHOWN]
    for position, line in enumerate(shown):
        yield f"  {what if not position else '':<8} {line}"
    if len(shown) < len(lines):
        yield f"  {'':<8} and {len(lines) - len(shown)} more"


def _slot(slot: Slot) -> str:
    shape = ",".join(map(str, slot.shape))
    bound = f" (at most {slot.bound} rows)" if slot.bound is not None else ""
    return f"{slot.name}  {slot.kind} {slot.dtype}[{shape}]{bound}  {show_size(slot_bytes(slot))}"


def _first_ranks(ranks: Iterator[int], num: int) -> str:
    """The same for many ranks: it looks at all of a few, or at the first of many."""
    few = list(islice(ranks, max(_SHOWN + 1, 1 << 16)))
    return _ranks(few) if len(few) == num else ",".join(map(str, few[:_SHOWN])) + ",..."


def _ranks(ranks: list[int] | tuple[int, ...]) -> str:
    """`0-3` for neighbours, else `0,2`; long lists end in dots."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks[:_SHOWN])) + (",..." if len(ranks) > _SHOWN else "")
