"""Failure: what a pool saw of a rank that failed, and the error that says so in the plan's words."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from piper.errors import OutOfMemory, RankLost, RunError
from piper.ir.form.byte_sizes import show_size
from piper.plan.types import Plan
from piper.runtime.failure.board import Where
from piper.runtime.failure.story import Story, ranks_text

Kind = Literal["died", "error", "lost", "hangs"]
# The likelier cause first: a rank that lost a peer, or waits for one, is the effect.
_SOONER = "data that comes sooner, or launch(..., timeout=SECONDS)"
CAUSES: tuple[Kind, ...] = ("died", "error", "hangs", "lost")


@dataclass
class Failure(Exception):
    """A rank that died, raised, lost its peers or hangs; rank -1 hangs with all others.

    `facts`: `command`, `data` that it read, and `code` or `reason` of one that died, `error`, `trace`
    and (out of memory) `memory` of one that raised, `seconds` without progress. `others` is what else
    was seen.
    """

    kind: Kind
    rank: int
    facts: dict[str, Any] = field(default_factory=dict)
    board: Sequence[Where] = ()
    others: Sequence[Failure] = ()
    survivors: Sequence[int] = ()

    @property
    def is_loss(self) -> bool:
        """Whether others could do what the rank did: it raised nothing of its own."""
        return self.kind != "error" or "CUDA error" in self.facts.get("error", "")


def first_cause(failures: Sequence[Failure], board: Sequence[Where]) -> Failure:
    """The one that explains the others; of equal ones the one that was seen first."""
    chosen = min(failures, key=lambda failure: CAUSES.index(failure.kind))
    chosen.board = board
    chosen.others = [failure for failure in failures if failure is not chosen]
    return chosen


def as_error(failure: Failure, plans: Mapping[str, Plan]) -> RunError:
    """One error: the rank at fault, its task and directive, and what every other rank waited for."""
    command = failure.facts.get("command", "step")
    story = None
    if plans and failure.board and command == "step":
        gone = {f.rank for f in (failure, *failure.others) if f.kind == "died"}
        story = Story(plans, failure.board, gone)
    if failure.kind == "hangs":
        ranks, message = _hang(failure, story)
    else:
        ranks = [failure.rank]
        message = f"rank {failure.rank} {_what(failure, story)}"
        if story and "reason" in failure.facts:  # only those who share a machine see the very last
            message += ", last seen"
        message += story.place(failure.rank) if story else _during(command)
        message += _reason(failure)
    known = {f.rank: _what(f, None) + _reason(f) for f in failure.others if f.kind != "lost"}
    details = story.others(ranks, known) if story else []
    memory = failure.facts.get("memory")
    error: RunError
    if memory is None:
        slow = failure.kind == "hangs" and "data" in failure.facts
        if failure.is_loss and not slow:
            lost = [r for r in ranks if r >= 0]
            error = RankLost(message, details=details, ranks=lost, survivors=failure.survivors)
        else:
            error = RunError(message, details=details, legal=_SOONER if slow else None)
    else:
        held = [f"it holds {_sizes(memory['held'])}"] if memory["held"] else []
        largest = [f"{show_size(n)} {use}: {name}" for name, n, use in memory["largest"]]
        error = OutOfMemory(message, details=[*held, *largest, *details], held=memory["held"])
    if failure.facts.get("trace"):
        error.add_note("\n".join([f"On rank {failure.rank}:", *failure.facts["trace"]]))
    return error


def _what(failure: Failure, story: Story | None) -> str:
    match failure.kind:
        case "died":
            return "died" if "reason" in failure.facts else _ending(failure.facts["code"])
        case "lost":
            peers = story.waited_for(failure.rank) if story else []
            return f"lost {ranks_text(peers)}" if peers else "lost its peers"
        case "hangs":
            return "hangs"
        case _:
            return "ran out of memory" if "memory" in failure.facts else "failed"


def _reason(failure: Failure) -> str:
    found = failure.facts.get("error") or failure.facts.get("reason")
    return f": {found}" if found else ""


def _hang(failure: Failure, story: Story | None) -> tuple[list[int], str]:
    """The ranks that hang, and what there is to say of them."""
    seconds = f"{failure.facts['seconds']:g} s"
    frozen: list[int] = failure.facts.get("frozen", [])
    if frozen:
        reason = f"its process has not run for {seconds}"
        if len(frozen) > 1:
            reason = f"their processes have not run for {seconds}"
    elif "data" in failure.facts:
        reason = f"no batch has come for {seconds}"
    else:
        reason = f"no rank has got further for {seconds}"
    command = failure.facts.get("data") or failure.facts.get("command", "step")
    ranks = frozen or (story.culprits() if story else failure.facts.get("waiting", []))
    if ranks:
        where = story.place(ranks[0]) if story else _during(command)
        return ranks, f"{ranks_text(ranks)} hang{'s' * (len(ranks) == 1)}{where}: {reason}"
    lost = story.lost() if story else None
    if story and lost:
        peers, rank = lost
        text = f"what {ranks_text(peers)} gave never came to rank {rank}{story.place(rank)}"
        return [], f"{text}: {reason}"
    return [], f"{reason}{_during(command)}"


def _during(command: str) -> str:
    return " at its start" if command == "start" else f" in {command}"


def _ending(code: int | None) -> str:
    if code is None:
        return "is gone"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"was killed ({name}{hint})"


def _sizes(held: Mapping[str, int]) -> str:
    return ", ".join(f"{show_size(size)} {use}" for use, size in held.items())
