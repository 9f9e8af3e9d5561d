"""Plans that run layers again, cut over ranks: what is kept, what communicates again, and when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import piper
from piper import where
from piper.api.job import Job
from piper.check.parties import compressed
from piper.cost.estimate import NOMINAL
from piper.observe.pictures.characters import draw_text
from piper.observe.pictures.styles import STYLES
from piper.passes.dispatch.pace import RECEIVE_AHEAD
from piper.plan.memory_ledger import MemoryLedger
from piper.plan.tasks import Comm, Run, Task
from piper.sim.simulate import simulate
from piper.strategies import parallel
from tests.tensor_checkpoints import Checkpointed, Selective, Untagged, job_of
from tests.tensor_zoo import BATCH, LENGTH, WIDTH, program_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("again_plans")

ACTIVATION = BATCH * LENGTH * WIDTH * 8  # bytes of what passes between layers, whole


@cache
def _job(name: str = "deep", **degrees: Any) -> Job:
    return program_of(name).apply(parallel(**degrees)).lower(optimizer=ADAMW)


def _most(job: Job) -> tuple[int, int]:
    """Bytes of what is saved when the last forward is over; and the most of all but parameters and what
    is kept for these."""
    world = compressed(job.plan)
    saved = rest = 0
    for party in world.distinct:
        ledger = MemoryLedger(world.plan, world.local(party))
        for index in range(len(party.tasks)):
            ledger.start(index)
            held = ledger.held
            state = sum(held[what] for what in ("parameters", "gradients", "optimizer"))
            rest = max(rest, ledger.total - state)
            ledger.end(index)
            task = party.tasks[index]
            if isinstance(task, Run) and task.phase == "F":
                saved = ledger.held["saved"]
    return saved, rest


def _runs(job: Job) -> list[Run]:
    return [task for part in job.plan.classes for task in part.tasks if isinstance(task, Run)]


def _comms(job: Job) -> Counter[str]:
    tasks = [task for part in job.plan.classes for task in part.tasks]
    return Counter(t.comm for t in tasks if isinstance(t, Comm))


@pytest.mark.parametrize(
    "degrees",
    [
        {"tp": 2, "sp": True},
        {"tp": 2, "sp": True, "microbatches": 4},
        {"tp": 2, "sp": True, "microbatches": 4, "recompute": "nothing"},
        *(
            {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": schedule}
            for schedule in ("1f1b", "zb_h1", "dualpipev")
        ),
        {"cp": 2, "microbatches": 2},
    ],
)
def test_what_is_gathered_again_is_there_two_chunks_early_at_most(degrees: dict[str, Any]) -> None:
    """A forward's parts are there long before; gathered then, they would be kept, and keep the link
    from what the next forward waits for."""
    distances = [
        distance
        for part in _job(**degrees).plan.classes
        for at, task in enumerate(part.tasks)
        if isinstance(task, Comm) and task.name.startswith("again>")
        for distance in [_chunks_until_read(part.tasks[at:], task.target)]
    ]
    assert distances and max(distances) <= RECEIVE_AHEAD


def _chunks_until_read(tasks: Sequence[Task], slot: int) -> int:
    runs = [task for task in tasks if isinstance(task, Run)]
    return next(place for place, task in enumerate(runs) if slot in task.reads)


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", [Untagged, Checkpointed])
def test_a_layer_keeps_its_input(kind: type[Untagged], sp: bool) -> None:
    """A whole activation, or where sequences are cut, the rank's part; besides, the head keeps its
    input, and all that it saves where it is not checkpointed. A layer more costs one more at the peak,
    and not what lies between its pieces."""
    keep = "nothing" if kind is Untagged else None
    each = ACTIVATION // 2 if sp else ACTIVATION
    saved, peaks = {}, {}
    for layers in (2, 4):
        job = job_of(kind, layers, tp=2, sp=sp, recompute=keep)
        saved[layers], peaks[layers] = _most(job)
        assert saved[layers] == (layers + 1) * each or kind is Checkpointed
    assert saved[4] - saved[2] == peaks[4] - peaks[2] == 2 * each
    plain = _most(job_of(Untagged, 4, tp=2, sp=sp))
    assert plain[0] > 8 * 5 * each and plain[1] > 1.8 * peaks[4]


def test_pieces_keep_more_and_communicate_less() -> None:
    """Per piece, what each reads is kept. With nothing kept a layer has one more sum, of which the last
    is not needed, and the head the one of its loss."""
    sizes = {}
    for keep in ("everything", "expensive", "pieces", "nothing"):
        sizes[keep], _ = _most(job_of(tp=2, recompute=keep))
    assert sizes["everything"] > sizes["expensive"] > sizes["pieces"] > sizes["nothing"]
    assert sizes["pieces"] > 3 * sizes["nothing"]
    plain, pieces = (job_of(tp=2, recompute=keep) for keep in ("everything", "pieces"))
    again = job_of(tp=2, recompute="nothing")
    assert _comms(plain) == _comms(pieces) == {"all_reduce": 4 * 4 + 3}
    assert _comms(again) == {"all_reduce": 5 * 4 + 4}
    assert not [run for run in (*_runs(plain), *_runs(pieces)) if run.phase == "R"]
    assert again.plan.flops == plain.plan.flops


def test_sequences_are_gathered_and_scattered_again() -> None:
    """Per layer: the input of attention, for it and for the gradients of its weights, as without; and
    the sum behind attention."""
    plain, again = (job_of(tp=2, sp=True, recompute=keep) for keep in ("everything", "nothing"))
    more = _comms(again) - _comms(plain)
    assert more == {"all_gather": 4 + 1, "reduce_scatter": 4, "all_reduce": 1}


def test_a_policy_keeps_products() -> None:
    job = job_of(Selective, tp=2)
    assert {node.checkpoint for node in job.graph.chunks} == {"", "expensive"}
    assert _most(job) < _most(job_of(tp=2))


@pytest.mark.parametrize("sp", [False, True])
def test_nothing_runs_again_before_it_is_needed(sp: bool) -> None:
    """Between a layer's pieces that run again and their backwards no other layer computes, and what is
    gathered for them is not before the second chunk ahead."""
    job = job_of(tp=2, sp=sp, recompute="nothing")
    (part,) = job.plan.classes
    chunk_of = {node.name: node.piece_of for node in job.graph.chunks}
    chunks = [(i, t) for i, t in enumerate(part.tasks) if isinstance(t, Run)]
    layers = [chunk_of[task.name] for _, task in chunks if task.phase != "F"]
    assert layers == sorted(layers, reverse=True) and len(set(layers)) == 6
    place = {index: number for number, (index, _) in enumerate(chunks)}
    number = 0
    for index, task in enumerate(part.tasks):
        number = place.get(index, number - 1) + 1  # chunks that were dispatched before
        if isinstance(task, Comm) and task.comm == "all_gather" and "R[" in task.name:
            users = [place[i] for i, t in chunks if task.target in t.inputs]
            assert 0 <= min(users) - number <= 3, task.name
    assert sum(task.phase == "R" for _, task in chunks) == 3 * 4 + 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "dualpipev"])
def test_orders_run_them_with_their_backwards(schedule: str) -> None:
    """A microbatch's pieces run again where the table has its backward, or the input half of it."""
    job = _job(tp=2, pp=2, microbatches=4, schedule=schedule, recompute="nothing")
    for part in job.plan.classes:
        tasks = [t for t in part.tasks if isinstance(t, Run)]
        turns = {index for group in part.overlaps for index in group}
        for index, task in enumerate(part.tasks):
            if not isinstance(task, Run) or task.phase != "R" or index in turns:
                continue
            place = tasks.index(task)
            own = [t for t in tasks[place:] if t.tags == task.tags and t.phase[0] == "B"]
            between = tasks[place : tasks.index(own[0])]
            assert {t.tags for t in between} == {task.tags}, task.name


def test_without_an_order_they_wait_for_the_gradient() -> None:
    """Else all microbatches would run again while the first gradient is awaited."""

    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(pp=2, tp=2)
        for stage in range(4):
            s.place(where(PP=stage), mesh.at(pp=stage // 2))
        s.shard_tensor(where(), over="tp")
        s.split(where(), "MB", 4)
        s.recompute(where())

    job = program_of("deep").apply(strategy).lower(optimizer=ADAMW)
    part = job.plan.classes[0]
    again = [task for task in part.tasks if isinstance(task, Run) and task.phase == "R"]
    first = {task.tags: task for task in reversed(again) if dict(task.tags)["PP"] == 1}
    assert len(first) == 4
    for task in first.values():
        place = part.tasks.index(task)
        received = [
            t for t in part.tasks[:place]
            if isinstance(t, Comm) and t.comm == "recv" and t.tags == task.tags
        ]  # fmt: skip
        assert received, task.name


def test_they_are_told_and_shown() -> None:
    job = _job(tp=2, pp=2, microbatches=2, recompute="nothing")
    name = next(run.name for run in _runs(job) if run.phase == "R")
    assert "~again" in job.explain(name)
    again = next(
        task.name
        for part in job.plan.classes
        for task in part.tasks
        if isinstance(task, Comm) and task.name.endswith("~again")
    )
    assert "shard_tensor" in job.explain(again)
    assert STYLES["R"].meaning in draw_text(simulate(job.plan, NOMINAL), width=400)


@pytest.mark.parametrize("sp", [False, True])
def test_previews_foresee_no_less(sp: bool) -> None:
    program = program_of("deep").apply(parallel(tp=2, sp=sp, recompute="nothing"))
    foreseen: Counter[str] = Counter()
    for line in program.foreseen():
        foreseen.update(dict(line.comms))
    real = _comms(program.lower(optimizer=ADAMW))
    plain = _comms(_job(tp=2, sp=sp))
    assert real <= foreseen and not foreseen <= plain


def _over_two_axes(s: piper.Schedule) -> None:
    """Layers in turn over one axis and over the other."""
    mesh = s.mesh(a=2, b=2)
    s.place(where(), mesh.at())
    for axis, first in (("a", 0), ("b", 1)):
        params: dict[str, Any] = {}
        for number in range(first, 6, 2):
            params |= {f"{number}.0.weight": 0, f"{number}.0.bias": 0, f"{number}.2.weight": 1}
        s.shard_tensor(where(), over=axis, params=params)
    s.recompute(where(), keep="nothing")


def test_pieces_of_two_axes_are_of_chunks_of_their_own() -> None:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    program = piper.trace(
        lambda: nn.Sequential(*(layer() for _ in range(6))),
        torch.ones(4, 8),
        lambda model, x: model(x).square().mean(),
    )
    graph = program.apply(_over_two_axes).lower(optimizer=ADAMW).graph
    layers: dict[int, set[str]] = {}
    for node in graph.chunks:
        if node.phase == "F" and node.piece_of >= 0:
            read = {name.partition(".")[0] for name in node.inputs if ".weight" in name}
            layers.setdefault(node.piece_of, set()).update(read)
    assert len(layers) == 6 and all(len(read) == 1 for read in layers.values()), layers
