"""Failure: what a pool saw of a rank that failed, and the error that says so in the plan's words."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from piper.errors import RunError
from piper.plan.types import Plan, RankPlan, bind
from piper.runtime.board import Where

Kind = Literal["died", "error", "lost", "hangs"]
# The likelier cause first: a rank that lost a peer, or waits for one, is the effect.
CAUSES: tuple[Kind, ...] = ("died", "error", "lost", "hangs")


@dataclass
class Failure(Exception):
    """A rank that died, raised, or lost its peers, or (rank -1) a step in which nobody gets further."""

    kind: Kind
    rank: int
    facts: dict[str, Any] = field(default_factory=dict)
    board: Sequence[Where] = ()


def as_error(failure: Failure, plan: Plan | None) -> RunError:
    """One error: the rank at fault, its task and directive, and what every other rank waited for."""
    story = _Story(plan, failure.board) if plan is not None and failure.board else None
    if failure.kind == "hangs":
        ranks = story.culprits() if story else []
        message = f"no rank has got further for {failure.facts['seconds']:g} s"
        if ranks:
            message = f"{_ranks(ranks)} hang{'s' if len(ranks) == 1 else ''}: {message}"
    elif failure.kind == "died":
        ranks, message = [failure.rank], f"rank {failure.rank} {_ending(**failure.facts)}"
    else:
        ranks, message = [failure.rank], f"rank {failure.rank} failed"
    stepping = failure.facts.get("command", "step") == "step"
    if story and stepping and ranks:
        message += story.place(ranks[0])
    elif not stepping:
        message += f" in {failure.facts['command']}"
    if "error" in failure.facts:
        message += f": {failure.facts['error']}"
    details = [] if story is None or not stepping else story.lines(ranks)
    return RunError(message, details=[*details, *failure.facts.get("trace", ())])


class _Story:
    """Where all ranks of a plan were."""

    def __init__(self, plan: Plan, board: Sequence[Where]) -> None:
        self.plan = plan
        self.board = board
        self.bound = cache(lambda rank: bind(plan, rank))

    def place(self, rank: int) -> str:
        """` in TASK of step 3, from DIRECTIVE`."""
        index = self._index(rank)
        if index is None:
            return ""
        task = self._me(rank).tasks[index]
        text = f" in {task.name} of step {self.board[rank].step}"
        if task.origin >= 0:
            text += f", from {self.plan.history[task.origin].call}"
        return text

    def lines(self, but: Sequence[int]) -> list[str]:
        """What each other rank was doing."""
        found = []
        for rank in range(self.plan.mesh.size):
            if rank in but:
                continue
            waits = self.board[rank].waits
            if self._index(rank) is None:
                found.append(f"rank {rank} waited for the others to end the step")
            elif waits < 0:
                found.append(f"rank {rank} was{self.place(rank)}")
            else:
                missing = self._missing(rank) or list(self._peers(rank))
                found.append(
                    f"rank {rank} waited for {_ranks(missing)} in {self._me(rank).tasks[waits].name}"
                )
        return found

    def culprits(self) -> list[int]:
        """The ranks that somebody waits for and that wait for nobody; else those that wait for none."""
        waits_for = {r: self._missing(r) for r in range(self.plan.mesh.size)}
        idle = [r for r, peers in waits_for.items() if not peers]
        blamed = {peer for peers in waits_for.values() for peer in peers}
        # Who is blamed need not have begun the step.
        return [r for r in idle if r in blamed] or [r for r in idle if self._index(r) is not None]

    def _me(self, rank: int) -> RankPlan:
        return self.bound(rank)

    def _index(self, rank: int) -> int | None:
        """The task a rank is at, if it is within a step."""
        where = self.board[rank]
        inside = where.step > 0 and 0 <= where.task < len(self._me(rank).tasks)
        return where.task if inside else None

    def _peers(self, rank: int) -> tuple[int, ...]:
        me = self._me(rank)
        task = me.tasks[self.board[rank].waits]
        return tuple(r for r in me.groups.get(task.group, ()) if r != rank)

    def _missing(self, rank: int) -> list[int]:
        """The peers that have not come to the communication that a rank waits for."""
        where = self.board[rank]
        if where.waits < 0 or where.waits >= len(self._me(rank).tasks):
            return []
        key = self._me(rank).tasks[where.waits].key
        return [r for r in self._peers(rank) if not self._came(r, key, where.step)]

    def _came(self, rank: int, key: str, step: int) -> bool:
        where = self.board[rank]
        if where.step != step:
            return where.step > step
        return any(task.key == key for task in self._me(rank).tasks[: where.task + 1] if task.key)


def _ending(*, code: int = 0, reason: str = "", **_: object) -> str:
    if reason:
        return f"died: {reason}"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed ({name}{hint})"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(r) for r in ranks)}"
