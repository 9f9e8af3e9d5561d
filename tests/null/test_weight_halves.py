"""Gradients of weights beside the communication of tensors that are cut, and beside the exchange of
experts' rows; turns that hide it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from piper.api.job import Job
from piper.plan.tasks import Comm, Run
from piper.plan.types import RankClass
from piper.strategies import parallel
from tests import zoo
from tests.tensor_zoo import program_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("weight_halves")


@cache
def _job(name: str = "dense", **degrees: Any) -> Job:
    return program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW)


def _runs(part: RankClass) -> dict[str, int]:
    return {task.name: i for i, task in enumerate(part.tasks) if isinstance(task, Run)}


def _behind(part: RankClass, index: int) -> Iterator[tuple[int, Comm]]:
    """Communication along axes that share tensors of what a chunk has made."""
    made = part.tasks[index].writes
    for place, task in enumerate(part.tasks):
        if isinstance(task, Comm) and task.source in made and not task.facts.is_message:
            yield place, task


@pytest.mark.parametrize(
    ("degrees", "kind"),
    [
        ({"tp": 2}, "all_reduce"),
        ({"tp": 2, "sp": True}, "reduce_scatter"),
        ({"tp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"}, "all_reduce"),
        ({"tp": 2, "sp": True, "pp": 2, "microbatches": 2, "schedule": "gpipe"}, "reduce_scatter"),
        ({"tp": 2, "microbatches": 2, "recompute": "nothing"}, "all_reduce"),
        ({"cp": 2}, "reduce_scatter all_reduce"),  # that of positions, which ranks read in part
    ],
    ids=str,
)
def test_weights_are_computed_beside_the_communication(degrees: Any, kind: str) -> None:
    """BI, then the collective on its own stream, then BW, which does not wait for it, and only then
    the chunk that does."""
    job = _job(**degrees)
    seen = 0
    for part in job.plan.classes:
        runs = _runs(part)
        streams = [stream.name for stream in job.plan.streams]
        for name, half in runs.items():
            if not name.startswith("BW"):
                continue
            first = runs[f"BI{name.removeprefix('BW')}"]
            behind = list(_behind(part, first))
            assert behind and {comm.comm for _, comm in behind} <= {*kind.split()}
            assert first < behind[0][0] < half  # others follow on the same stream
            for place, comm in behind:
                assert streams[comm.stream] == "tensor" and part.tasks[half].stream != comm.stream
                assert place not in part.tasks[half].waits
                waiting = [i for i in runs.values() if comm.target in part.tasks[i].reads]
                assert all(half < i for i in waiting)
                seen += 1
    layers, microbatches = 2, degrees.get("microbatches", 1)
    assert seen >= 2 * layers * microbatches


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_weights_are_computed_beside_the_rows_of_experts(schedule: str) -> None:
    """Those of experts while their rows' gradients travel back, and those of the code behind experts
    while its gradients travel to them."""
    strategy = parallel(pp=2, dp=2, ep=2, microbatches=4, schedule=schedule)
    job = zoo.program_of("deep").apply(strategy).lower(optimizer=ADAMW)
    seen = {True: 0, False: 0}
    for part in job.plan.classes:
        runs = _runs(part)
        experts = {name for name in runs if "EP=" in name}
        for name in experts:
            assert not name.startswith("B["), name
        for name, half in runs.items():
            first = runs.get(f"BI{name.removeprefix('BW')}", -1) if name.startswith("BW") else -1
            rows = [(i, c) for i, c in _behind(part, first) if c.comm == "all_to_all"]
            for place, comm in rows if first >= 0 else ():
                waiting = [i for i in runs.values() if comm.target in part.tasks[i].reads]
                assert first < place < half < min(waiting), name
                assert place not in part.tasks[half].waits
                seen[name in experts] += 1
    assert min(seen.values()) >= 4, seen


def test_only_backwards_with_matrices_and_communication_are_halved() -> None:
    """Two a layer, and the head; norms, residuals, tables and turns of a ring stay whole, but the last
    turn, which is one piece with the product behind it."""
    (part,) = _job(tp=2).plan.classes
    runs = _runs(part)
    halved = [name for name in runs if name.startswith("BW")]
    assert len(halved) == 2 * 2 + 1
    whole = [name for name in runs if name.startswith("B[")]
    assert whole and not any(list(_behind(part, runs[name])) for name in whole)
    ring = _runs(_job(cp=4, cp_attention="ring").plan.classes[0])
    halved = [name for name in ring if name.startswith("BW")]
    whole = [name for name in ring if name.startswith("B[")]
    assert len(halved) <= 2 * 2 and len(whole) >= 2 * 3
    alone = _job(dp=2), _job("mixture", dp=2)  # experts on every rank: no row travels
    for job in alone:
        assert not [run for run in _runs(job.plan.classes[0]) if run.startswith("BW")]


def test_an_order_that_names_halves_says_when_they_run() -> None:
    """Weights wait where the table has them."""
    job = _job(tp=2, pp=2, microbatches=4, schedule="zb_h1")
    part = job.plan.classes[0]
    names = [task.name for task in part.tasks if isinstance(task, Run)]
    first = next(i for i, name in enumerate(names) if name.startswith("BW"))
    inputs = [name for name in names[:first] if name.startswith("BI")]
    assert len({name.partition("MB=")[2] for name in inputs}) > 1 or len(inputs) > 3
    assert not [name for name in names if name.startswith("B[")]


# Chunks that take turns


@pytest.mark.parametrize("keep", [None, "nothing"])
@pytest.mark.parametrize("sp", [False, True])
def test_communication_of_tensors_hides_behind_the_other_turn(sp: bool, keep: Any) -> None:
    """In a pair that overlaps, what a chunk has to communicate is dispatched before the next turn, and
    that is the other microbatch's as long as it has chunks left."""
    degrees: dict[str, Any] = {"tp": 2, "sp": sp, "pp": 2, "microbatches": 4}
    job = _job("deep", **degrees, schedule="dualpipev", recompute=keep)
    kinds = set()
    hidden = exposed = 0
    for part in job.plan.classes:
        for group in part.overlaps:
            runs = [i for i in group if isinstance(part.tasks[i], Run)]
            for place, index in enumerate(runs[:-1]):
                following = runs[place + 1]
                left = {_member(part, i) for i in runs[place + 1 :]}
                for at, comm in _behind(part, index):
                    if at not in group or not _is_first_use_inside(part, comm, runs):
                        continue
                    assert at < following, comm.name
                    kinds.add(comm.comm)
                    waits = comm.target in part.tasks[following].reads
                    assert not (waits and len(left) > 1), comm.name
                    hidden, exposed = hidden + (not waits), exposed + waits
    assert kinds >= ({"all_gather", "reduce_scatter"} if sp else {"all_reduce"})
    assert hidden > 5 * exposed


def _member(part: RankClass, index: int) -> bool:
    """Whether a chunk is of the forward or of the backward of a pair."""
    task = part.tasks[index]
    return isinstance(task, Run) and task.phase == "F"


def _is_first_use_inside(part: RankClass, comm: Comm, runs: list[int]) -> bool:
    """Whether a chunk of the pair is the first to read what is communicated."""
    readers = [i for i, t in enumerate(part.tasks) if isinstance(t, Run) and comm.target in t.reads]
    return bool(readers) and readers[0] in runs
