"""Problem: one thing that a proof found wrong, with the tasks that show it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from piper.check.parties import Party, World
from piper.plan.tasks import Meeting


@dataclass(frozen=True)
class Problem:
    """Which proof failed, why, by which tasks; `witness` has a line for each."""

    proof: str
    message: str
    tasks: tuple[str, ...] = ()
    witness: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join((f"{self.proof}: {self.message}", *(f"    {w}" for w in self.witness)))


def problem(
    world: World,
    proof: str,
    message: str,
    *tasks: tuple[Party, int],
    facts: Iterable[str] = (),
) -> Problem:
    """A problem whose witness are these tasks of these parties."""
    names = tuple(party.tasks[index].name for party, index in tasks)
    lines = (task_line(world, party, index) for party, index in tasks)
    return Problem(proof, message, names, (*dict.fromkeys(lines), *facts))


def task_line(world: World, party: Party, index: int, why: str = "") -> str:
    """`pp=0: 12 send send>x on pp=0>pp=1, from place (train.py:41)`."""
    task = party.tasks[index]
    stream = world.plan.streams[task.stream].name
    line = f"{party.label}: task {index} {task.kind} {task.name} on {stream}"
    if isinstance(task, Meeting):
        line += f", group {world.plan.groups[task.group]}"
    if 0 <= task.origin < len(world.plan.history):
        line += f", from {world.plan.history[task.origin].call}"
    return f"{line} {why}".rstrip()
