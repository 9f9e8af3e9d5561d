"""Story: the board in the plan's words: where each rank was, whom it waited for, who is at fault."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

from piper.plan.tasks import Comm, Meeting, Task
from piper.plan.types import Plan, RankPlan, bind
from piper.runtime.failure.board import Where

MOST_LINES = 24


class Story:
    """Where the ranks of some plans were. `gone` are those whose process ended."""

    def __init__(
        self, plans: Mapping[str, Plan], board: Sequence[Where], gone: Collection[int] = ()
    ) -> None:
        self.plans = list(plans.items())
        self.board = board
        self.gone = gone
        self.turn = max(where.turn for where in board)
        self._bound = cache(lambda plan, rank: bind(self.plans[plan][1], rank))

    def place(self, rank: int) -> str:
        """` in TASK of step 3, from DIRECTIVE`, or as much of it as there is."""
        where, task = self.board[rank], self._task(rank)
        if task is not None:
            text = f" in {task.name} of {self._step(rank)}"
            if task.origin >= 0:
                text += f", from {self.plans[where.plan][1].history[task.origin].call}"
            return text
        if where.turn == 0:
            return " before its first step"
        if not self._inside(rank):
            return f" after {self._step(rank)}"
        end = "first" if where.task < 0 else "last"
        return f" {'before' if end == 'first' else 'after'} the {end} task of {self._step(rank)}"

    def others(self, but: Collection[int], known: Mapping[int, str]) -> list[str]:
        """What each other rank was doing, or what is `known` of it; equal ones in one line."""
        found: dict[str, list[int]] = {}
        for rank in range(len(self.board)):
            if rank not in but:
                found.setdefault(known.get(rank) or self._doing(rank), []).append(rank)
        lines = [f"{ranks_text(ranks)} {text}" for text, ranks in found.items()]
        more = len(lines) - MOST_LINES
        return [*lines[:MOST_LINES], f"and {more} more"] if more > 0 else lines

    def culprits(self) -> list[int]:
        """Ranks that wait for no other; of those the ones that others wait for, if there are any."""
        waits_for = {rank: self._missing(rank) for rank in range(len(self.board))}
        roots = [rank for rank in waits_for if self._busy(rank) or self._late(rank)]
        blamed = {peer for peers in waits_for.values() for peer in peers}
        return [rank for rank in roots if rank in blamed] or roots

    def lost(self) -> tuple[list[int], int] | None:
        """Who sent and who waits, where all have come to a communication and it does not end."""
        for rank in range(len(self.board)):
            peers = self._peers(rank)
            if peers and not self._missing(rank):
                return peers, rank
        return None

    def waited_for(self, rank: int) -> list[int]:
        """The peers that keep a rank waiting: gone, or not there yet, or any."""
        gone = [r for r in self._group(self._task(rank), rank) if r in self.gone]
        return gone or self._missing(rank) or self._peers(rank)

    def _doing(self, rank: int) -> str:
        where, task = self.board[rank], self._task(rank)
        peers = self.waited_for(rank)
        if task is not None and peers:
            return f"waited for {ranks_text(peers)} in {task.name}"
        if task is not None:
            return f"was in {task.name}"
        if self._late(rank):
            return "had not begun the step"
        if not self._inside(rank):
            return "had ended the step" if where.turn else "was idle"
        return "was before its first task" if where.task < 0 else "was after its last task"

    def _step(self, rank: int) -> str:
        where = self.board[rank]
        name = self.plans[where.plan][0] if self._inside(rank) else "train"
        return f"step {where.step}" if name == "train" else f"{name} step {where.step}"

    def _inside(self, rank: int) -> bool:
        return 0 <= self.board[rank].plan < len(self.plans)

    def _late(self, rank: int) -> bool:
        return self.board[rank].turn < self.turn

    def _busy(self, rank: int) -> bool:
        return self._inside(rank) and not self._late(rank) and not self._peers(rank)

    def _me(self, rank: int) -> RankPlan:
        found: RankPlan = self._bound(self.board[rank].plan, rank)
        return found

    def _task(self, rank: int) -> Task | None:
        """The communication that a rank waits for, else the task it has begun, if any."""
        where = self.board[rank]
        index = where.waits if where.waits >= 0 else where.task
        if not self._inside(rank) or not 0 <= index < len(self._me(rank).tasks):
            return None
        return self._me(rank).tasks[index]

    def _peers(self, rank: int) -> list[int]:
        """With whom a rank is in a communication that it waits for."""
        waits = self.board[rank].waits >= 0
        return self._group(self._task(rank), rank) if waits else []

    def _group(self, task: Task | None, rank: int) -> list[int]:
        if not isinstance(task, Meeting):
            return []
        return [r for r in self._me(rank).groups[task.group] if r != rank]

    def _missing(self, rank: int) -> list[int]:
        """The peers that have not come to the communication that a rank waits for."""
        return [peer for peer in self._peers(rank) if not self._came(peer, rank)]

    def _came(self, peer: int, rank: int) -> bool:
        it, me, task = self.board[peer], self.board[rank], self._task(rank)
        if it.turn != me.turn:
            return it.turn > me.turn
        if not self._inside(peer) or it.plan != me.plan:
            return not self._inside(peer)
        # A host that waits has not begun its task; a device is no further than what it waits for.
        device = self.plans[it.plan][1].device != "cpu"
        begun = it.task + 1 if it.waits < 0 else it.waits + 1 if device else it.task
        come = self._me(peer).tasks[:begun]
        meeting = task.meeting if isinstance(task, Comm) else None
        return any(isinstance(found, Comm) and found.meeting == meeting for found in come)


def ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(str(r) for r in ranks)}"
