"""The adversary catches faults: a plan with one wait less, two sends swapped, a slot freed early."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from piper.api.job import Job
from piper.api.run import Run
from piper.errors import RunError
from piper.plan.tasks import Task
from piper.plan.types import Plan, RankClass
from piper.training.verify import compare, train_one_device
from tests.loopback.pools import loopback
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = pytest.mark.xdist_group("skip")
SEEDS = range(32)


def _job(zero: int = 0) -> Job:
    strategy = strategy_of("pp2_ep2", "1f1b", zero=zero)
    return program_of("skip").apply(strategy).lower(optimizer=ADAMW)


def _with_tasks(plan: Plan, index: int, tasks: list[Task]) -> Plan:
    part = msgspec.structs.replace(plan.classes[index], tasks=tuple(tasks))
    classes = (*plan.classes[:index], part, *plan.classes[index + 1 :])
    return msgspec.structs.replace(plan, classes=classes)


def _fails(job: Job, plan: Plan) -> str:
    """How the adversary sees that a plan is wrong: an error, or numbers that are; '' if it does not."""
    reference = train_one_device(job, batches_of("skip")[:1])
    for seed in SEEDS:
        run = Run(plan, loopback(plan, job.bodies, adversary=True, seed=seed))
        try:
            errors = compare(run, batches_of("skip")[:1], reference)
        except (RunError, RuntimeError, IndexError, TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        if not errors.exact:
            return "wrong numbers"
    return ""


def test_the_unchanged_plan_passes() -> None:
    job = _job()
    assert _fails(job, job.plan) == ""


def _waits(plan: Plan) -> Iterator[tuple[int, int, int]]:
    for number, part in enumerate(plan.classes):
        for index, task in enumerate(part.tasks):
            for wait in task.waits:
                yield number, index, wait


# A receive or a gather is held back behind an earlier chunk, and a sum behind an earlier reduction, for
# memory alone.
HARMLESS = {
    ("run", "recv"),
    ("run", "all_gather"),
    ("run", "all_reduce"),  # a total that is only reported
    ("reduce_scatter", "add"),
}


@pytest.mark.parametrize(("zero", "kinds"), [(0, 8), (2, 8), (3, 8)])
def test_one_event_wait_removed(zero: int, kinds: int) -> None:
    """Every kind of wait in the plan, by the kinds of the two tasks, once each."""
    job = _job(zero=zero)
    tried = {}
    for number, index, wait in _waits(job.plan):
        tasks = list(job.plan.classes[number].tasks)
        pair = (tasks[wait].kind, tasks[index].kind)
        if pair in tried:
            continue
        left = tuple(w for w in tasks[index].waits if w != wait)
        tasks[index] = msgspec.structs.replace(tasks[index], waits=left)
        tried[pair] = _fails(job, _with_tasks(job.plan, number, tasks))
    print({pair: (reason.splitlines() or [""])[0] for pair, reason in tried.items()})
    missed = {pair for pair, reason in tried.items() if not reason}
    assert missed <= HARMLESS
    assert len(tried) >= kinds


def test_two_sends_swapped() -> None:
    """Trap 9: tensors of one shape, matched only by order."""
    job = _job()
    tasks = list(job.plan.classes[0].tasks)
    sends = [i for i, task in enumerate(tasks) if task.kind == "send"]
    a, b = sends[0], sends[1]
    tasks[a], tasks[b] = (
        msgspec.structs.replace(tasks[a], source=tasks[b].source, key=tasks[b].key),
        msgspec.structs.replace(tasks[b], source=tasks[a].source, key=tasks[a].key),
    )
    assert _fails(job, _with_tasks(job.plan, 0, tasks))


def test_a_slot_freed_early() -> None:
    job = _job()
    part: RankClass = job.plan.classes[0]
    tasks = list(part.tasks)
    last = next(i for i in reversed(range(len(tasks))) if tasks[i].kind == "run" and tasks[i].frees)
    slot = tasks[last].frees[0]
    users = [i for i, task in enumerate(tasks) if slot in (*task.reads, *task.writes)]
    assert len(users) > 1 and users[-1] == last
    early = users[-2]
    tasks[last] = msgspec.structs.replace(
        tasks[last], frees=tuple(s for s in tasks[last].frees if s != slot)
    )
    tasks[early] = msgspec.structs.replace(tasks[early], frees=(*tasks[early].frees, slot))
    assert "which is not there" in _fails(job, _with_tasks(job.plan, 0, tasks))


def test_a_slot_freed_on_one_stream_while_another_reads_it() -> None:
    """Trap 10: the compute stream frees what the send has not read yet."""
    job = _job()
    tasks = list(job.plan.classes[0].tasks)
    send = next(i for i, task in enumerate(tasks) if task.kind == "send")
    slot = tasks[send].reads[0]
    maker = next(i for i, task in enumerate(tasks) if slot in task.writes)
    owner = next(i for i, task in enumerate(tasks) if slot in task.frees)
    tasks[owner] = msgspec.structs.replace(
        tasks[owner], frees=tuple(s for s in tasks[owner].frees if s != slot)
    )
    tasks[maker] = msgspec.structs.replace(tasks[maker], frees=(*tasks[maker].frees, slot))
    assert "which is not there" in _fails(job, _with_tasks(job.plan, 0, tasks))
