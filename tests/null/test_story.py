"""Who is blamed, from boards alone: no processes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import piper
from piper import schedules, where
from piper.api.advice import advice, taken_in
from piper.plan.types import Plan, bind
from piper.runtime.failure.board import Board, Where, begin, clear, end
from piper.runtime.failure.board import where as read
from piper.runtime.failure.failure import Failure, as_error, first_cause
from piper.runtime.failure.story import Story
from tests.strategies import strategy_of
from tests.zoo import program_of

START = "rank 1 hangs in F[PP=1,MB=0] of step 2, from place (tests/null/test_story.py:{line})"


def strategy(s: piper.Schedule) -> None:
    mesh = s.mesh(pp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))  # the line in the errors
    s.split(where(), "MB", 2)
    s.order(schedules.one_f_one_b(num_ranks=2, num_microbatches=2))


LINE = strategy.__code__.co_firstlineno + 3


@cache
def _plan() -> Plan:
    return program_of("dense").apply(strategy).lower().plan


def _at(rank: int, task: str = "", waits: str = "", step: int = 2) -> Where:
    names = [t.name for t in bind(_plan(), rank).tasks]
    found = Where(turn=step, plan=0, step=step, task=names.index(task) if task else -1)
    return replace(found, waits=names.index(waits)) if waits else found


def _hang(board: list[Where], **facts: object) -> str:
    failure = Failure("hangs", -1, {"seconds": 3.0, **facts}, board)
    return str(as_error(failure, {"train": _plan()}))


# Rank 0 waits for the gradient of its first microbatch.
WAITING = ("B[PP=0,MB=0]", "recv>$d.%x_2/1[MB=0]@pp=0")


def test_the_rank_that_computes_is_blamed_by_the_one_that_waits() -> None:
    text = _hang([_at(0, *WAITING), _at(1, "F[PP=1,MB=0]")])
    assert text == (
        f"{START.format(line=LINE)}: no rank has got further for 3 s\n"
        "    rank 0 waited for rank 1 in recv>$d.%x_2/1[MB=0]@pp=0"
    )


def test_a_process_that_does_not_run_is_blamed_though_it_waits_itself() -> None:
    board = [_at(0, "F[PP=0,MB=1]"), _at(1, "F[PP=1,MB=0]", "recv>%x_2[MB=0]@pp=1")]
    assert _hang(board).startswith("rank 0 hangs in F[PP=0,MB=1] of step 2")
    text = _hang(board, frozen=[1])
    assert text.startswith("rank 1 hangs in recv>%x_2[MB=0]@pp=1 of step 2, from ")
    assert ": its process has not run for 3 s\n    rank 0 was in F[PP=0,MB=1]" in text


def test_a_message_that_was_sent_and_never_came() -> None:
    board = [_at(0, *WAITING), _at(1, "F[PP=1,MB=0]", "recv>%x_2[MB=0]@pp=1")]
    text = _hang(board)
    assert text == (
        "what rank 0 gave never came to rank 1 in recv>%x_2[MB=0]@pp=1 of step 2, from place "
        f"(tests/null/test_story.py:{LINE}): no rank has got further for 3 s\n"
        "    rank 0 waited for rank 1 in recv>$d.%x_2/1[MB=0]@pp=0\n"
        "    rank 1 waited for rank 0 in recv>%x_2[MB=0]@pp=1"
    )


def test_a_host_that_waits_has_not_begun_the_task_it_is_at() -> None:
    """Rank 0 is at its send, but has to finish something before."""
    send = "send>%x_2[MB=0]@pp=1"
    receives = _at(1, "F[PP=1,MB=0]", "recv>%x_2[MB=0]@pp=1")
    begun = Story({"train": _plan()}, [_at(0, send), receives])
    assert begun.culprits() == [0]  # within the send itself
    held_up = Story({"train": _plan()}, [_at(0, send, WAITING[1]), receives])
    assert held_up.lost() is None
    assert held_up.waited_for(1) == [0]


def test_a_rank_that_has_not_begun_the_step_is_blamed() -> None:
    text = _hang([_at(0, *WAITING), replace(_at(1, step=1), plan=-1)])
    assert text.startswith("rank 1 hangs after step 1: no rank has got further for 3 s\n")


def test_ranks_that_ended_the_step_are_not_blamed() -> None:
    board = [_at(0, "update.b0@pp=0"), replace(_at(1), plan=-1, task=14)]
    text = _hang(board)
    assert text.startswith("rank 0 hangs in update.b0@pp=0 of step 2")
    assert text.endswith("\n    rank 1 had ended the step")


def test_a_task_is_looked_up_in_the_plan_that_was_running() -> None:
    """Two plans share the cells; the second has other tasks at the same numbers."""
    other = replace_tasks(_plan())
    cells = Board(1).cells(0)
    clear(cells)
    begin(cells, 0)
    end(cells)
    begin(cells, 1)
    names = [task.name for task in other.classes[0].tasks]
    cells[3] = names.index("other.F[PP=0,MB=0]")
    board = [replace(read(cells), step=7), Where(turn=1, plan=-1, step=7)]
    failure = Failure("error", 0, {"error": "ValueError: no"}, board)
    error = as_error(failure, {"train": _plan(), "eval": other})
    assert str(error).startswith("rank 0 failed in other.F[PP=0,MB=0] of eval step 7, from place")
    assert "rank 1 had not begun the step" in str(error)


def replace_tasks(plan: Plan) -> Plan:
    import msgspec

    classes = tuple(
        msgspec.structs.replace(
            c, tasks=tuple(msgspec.structs.replace(t, name=f"other.{t.name}") for t in c.tasks)
        )
        for c in plan.classes
    )
    return msgspec.structs.replace(plan, classes=classes)


def test_of_several_failures_the_cause_is_named_and_the_others_are_told() -> None:
    board = [_at(0, *WAITING), _at(1, "F[PP=1,MB=0]")]
    lost = Failure("lost", 0, {"error": "PeerError: broke off"})
    died = Failure("died", 1, {"code": -11, "command": "step"})
    text = str(as_error(first_cause([lost, died], board), {"train": _plan()}))
    assert text.startswith("rank 1 was killed (SIGSEGV) in F[PP=1,MB=0] of step 2, from place")
    assert text.endswith("\n    rank 0 waited for rank 1 in recv>$d.%x_2/1[MB=0]@pp=0")
    raised = Failure("error", 0, {"error": "IndexError: out of range"})
    text = str(as_error(first_cause([raised, died], board), {"train": _plan()}))
    assert text.endswith("\n    rank 0 failed: IndexError: out of range")


def test_failures_outside_of_steps_name_the_command() -> None:
    died = Failure("died", 1, {"code": 3, "command": "load"}, [Where(), Where()])
    assert str(as_error(died, {"train": _plan()})) == "rank 1 ended with exit code 3 in load"
    died = Failure("died", 1, {"code": -9, "command": "start"}, [Where(), Where()])
    assert str(as_error(died, {})).startswith("rank 1 was killed (SIGKILL, as the system does when")
    facts = {"seconds": 3.0, "frozen": [0], "command": "load"}
    text = str(as_error(Failure("hangs", -1, facts, [Where(), Where()]), {"train": _plan()}))
    assert text == "rank 0 hangs in load: its process has not run for 3 s"


@pytest.mark.parametrize(
    ("use", "directive"),
    [
        ("saved", "recompute("),
        ("parameters", "zero=3"),
        ("gradients", "zero=2"),
        ("optimizer", "zero=1"),
        ("gathered", "prefetch=0"),
        ("buffers", 'split(where(), "MB"'),
    ],
)
def test_the_advice_is_for_what_takes_most_memory(use: str, directive: str) -> None:
    others = dict.fromkeys(("saved", "parameters", "buffers"), 10)
    assert directive in (advice({**others, use: 1000}) or "")


def test_advice_that_is_taken_already_is_not_given_again() -> None:
    held = {"parameters": 100, "optimizer": 90, "saved": 80, "other": 200}
    assert "zero=1" in (advice(held, {"parameters"}) or "")
    assert "recompute" in (advice(held, {"parameters", "optimizer"}) or "")
    assert advice(held, {"parameters", "optimizer", "saved"}) == (
        "a larger mesh, with less on each rank"
    )
    whole, part = (
        program_of("dense").apply(strategy_of("dp2", "none", **more)).lower().plan
        for more in ({}, {"zero": 2, "recompute": "nothing"})
    )
    assert taken_in(whole) == set()
    assert taken_in(part) == {"optimizer", "gradients", "saved"}


def test_without_facts_there_is_no_advice() -> None:
    assert advice({}) is None
    assert advice({"other": 5}) is None
