"""Handlers: a Worker and one of its Tasks in, what to call when the task starts out; one per kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from piper.errors import RunError
from piper.plan.group_runs import runs_within
from piper.plan.holdings import window
from piper.plan.slots import STAYING, SUMS
from piper.plan.tasks import NO_SLOT, Add, Comm, Fold, Norm, Read, Run, Settle, Task, Update
from piper.plan.types import Bucket
from piper.runtime.transport.transport import Exchange, Pending
from piper.runtime.worker.adding import add_to_bucket, add_values, parts_of, views
from piper.runtime.worker.functions import added_by
from piper.runtime.worker.update import Piece, Updater, clip_scale

if TYPE_CHECKING:
    from piper.runtime.worker.worker import Worker

Start = Callable[[], Pending | None]
Handler = Callable[["Worker", Any], Start]
H = TypeVar("H", bound=Handler)
ADDED = object()  # in place of a gradient that its body has added to its sum
HANDLERS: dict[type[Task], Handler] = {}


def handles(kind: type[Task]) -> Callable[[H], H]:
    """Say how Workers run tasks of a kind. All that can be decided is decided before the first step."""

    def add(handler: H) -> H:
        HANDLERS[kind] = handler
        return handler

    return add


def prepare(worker: Worker, task: Task) -> Start:
    handler = HANDLERS.get(type(task))
    if handler is None:
        raise RunError(
            f"{task.name}: no Worker runs a task of kind {task.kind!r}",
            legal=", ".join(kind.__name__.lower() for kind in HANDLERS),
        )
    return handler(worker, task)


@handles(Run)
def _run(worker: Worker, task: Run) -> Start:
    function = worker.functions[task.body, added_by(task, worker.summed)]
    slots, inputs, outputs = worker.slots, task.inputs, task.outputs
    handed = [i for i in task.frees if i in worker.handed]
    sums = [_sum(worker, i) for i in outputs if i in worker.summed]

    def start() -> None:
        given = [slots[i] for i in inputs]
        for i in handed:
            slots[i] = None
        for i, result in zip(outputs, function(given), strict=True):
            slots[i] = result

    def start_with_sums() -> None:
        given = [slots[i] for i in inputs]
        given += [total() for total in sums]
        for i in handed:
            slots[i] = None
        for i, result in zip(outputs, function(given), strict=True):
            slots[i] = ADDED if result is None else result

    return start_with_sums if sums else start


def _sum(worker: Worker, term: int) -> Callable[[], torch.Tensor]:
    """Where in its sum a gradient is added, as the gradient's shape."""
    part, shape = worker.summed[term], worker.me.slots[term].shape
    end = part.offset + math.prod(shape)

    def total() -> torch.Tensor:
        found: torch.Tensor = worker.slots[part.sum][part.offset : end].view(shape)
        return found

    if worker.stays(part.sum):
        found = total()
        return lambda: found
    return total


@handles(Fold)
def _fold(worker: Worker, task: Fold) -> Start:
    function, slots = worker.functions[task.body, ()], worker.slots
    inputs, outputs = task.inputs, task.outputs

    def start() -> None:
        results = function([slots[i] for i in inputs])
        worker.steps.folded = worker.steps.begun
        for i, result in zip(outputs, results, strict=True):
            slots[i].copy_(result)  # an evaluation shows the same memory

    return start


@handles(Add)
def _add(worker: Worker, task: Add) -> Start:
    slot = worker.me.slots[task.sums[0]]
    cast = slot.kind == "sum" and task.first == (True,) and not task.offsets  # of a whole bucket
    if slot.bucket < 0 or cast:
        return add_values(task, worker.slots, worker.me.slots)
    bucket = worker.plan.buckets[slot.bucket]
    done = [term in worker.summed for term in task.terms]
    stays = worker.stays(task.sums[0])
    fresh = slot.kind in SUMS and task.zeros
    add = add_to_bucket(task, worker.slots, slot, bucket, stays=stays, done=done)
    if not fresh:
        return add
    (total,) = task.sums
    dtype = getattr(torch, slot.dtype)

    def start() -> None:
        worker.put(total, torch.empty(slot.shape, dtype=dtype, device=worker.device))
        add()

    return start


@handles(Read)
def _read(worker: Worker, task: Read) -> Start:
    slots, (sent, received), target = worker.slots, (task.sent, task.received), task.splits
    peers = len(worker.me.groups[task.group])

    def start() -> None:
        rows = [slots[i].reshape(peers, -1).sum(1) for i in (sent, received)]
        slots[target] = torch.stack(rows).tolist()

    return start


@handles(Norm)
def _norm(worker: Worker, task: Norm) -> Start:
    slots = worker.slots

    def start() -> None:
        norm = torch.linalg.vector_norm(slots[task.gradient], dtype=torch.float64)
        slots[task.squares] = norm.square() * task.weight

    return start


@handles(Update)
def _update(worker: Worker, task: Update) -> Start:
    slots, bucket = worker.slots, worker.plan.buckets[task.bucket]
    stepped = [slots[i] for i in task.stepped]
    updater = worker.updaters.get(task.bucket) or _updater(worker, task, bucket, stepped)
    worker.updaters[task.bucket] = updater

    def gradients() -> list[torch.Tensor]:
        flat = slots[task.gradient]
        return updater.grads_of([flat] if bucket.over else views(flat, parts_of(bucket)))

    fixed = gradients() if worker.stays(task.gradient) else None
    # Elsewhere than on a CPU the host would wait for it.
    looks = task.counted != NO_SLOT and worker.device.type == "cpu"
    divide, guard = _divisor(worker, task), worker.guard

    def start() -> None:
        if task.norm != NO_SLOT and guard.refuses(slots[task.norm]):
            return
        divisor = divide()
        if looks:
            check_count(float(divisor))
        scale = None
        if task.clip is not None:
            scale = clip_scale(slots[task.norm], divisor, task.clip)
        if task.late:
            updater.keep()
        updater.step(fixed or gradients(), divisor, scale)
        if not task.late:
            updater.average()

    return start


def _updater(worker: Worker, task: Update, bucket: Bucket, stepped: list[Any]) -> Updater:
    updater = Updater(
        worker.plan.param_groups,
        stepped,
        [worker.wide_of(i) for i in task.stepped],
        _pieces(worker, task, bucket, stepped),
        master=getattr(torch, bucket.master),
        state=getattr(torch, bucket.state),
    )
    if worker.plan.ema is not None:
        updater.keep_averages(worker.plan.ema)
    return updater


def _pieces(worker: Worker, task: Update, bucket: Bucket, stepped: list[Any]) -> list[Piece]:
    """Whole parameters, or the runs of the rank's part that each parameter group steps."""
    if not bucket.over:
        return [Piece(bucket.group_of(i), i, 0, t.numel()) for i, t in enumerate(stepped)]
    begin, end = window(worker.plan, worker.me, worker.me.slots[task.stepped[0]])
    return [Piece(run.group, 0, run.begin, run.end) for run in runs_within(bucket, begin, end)]


@handles(Settle)
def _settle(worker: Worker, task: Settle) -> Start:
    updater, slots, divide = worker.updaters[task.bucket], worker.slots, _divisor(worker, task)
    guard = worker.guard

    def start() -> None:
        if guard.refuses(slots[task.norm]):
            updater.undo()
            return
        updater.settle(clip_scale(slots[task.norm], divide(), task.clip))
        updater.average()

    return start


def _divisor(worker: Worker, task: Update | Settle) -> Callable[[], Any]:
    """What a gradient is divided by: a number of the plan, or of the batch."""
    slots, counted, count = worker.slots, task.counted, task.count
    return (lambda: count) if counted == NO_SLOT else (lambda: slots[counted])


@handles(Comm)
def _exchange(worker: Worker, task: Comm) -> Start:
    slots, known, kind = worker.slots, worker.me.slots, task.facts
    exchange = Exchange(
        task=task,
        stream=worker.plan.streams[task.stream],
        rank=worker.me.rank,
        ranks=worker.me.groups[task.group],
        outputs=(known[task.target],) if kind.leaves else (),
    )
    begin, source, hosts = worker.transport.start, task.source, task.splits
    target = task.target if kind.leaves and known[task.target].kind in STAYING else NO_SLOT
    place = worker.pooled.get(task.target)

    def start() -> Pending:
        splits = slots[hosts] if hosts >= 0 else None
        tensor = slots[source] if source >= 0 else None
        return begin(exchange, tensor, splits, slots[target] if target >= 0 else place)

    return start


def check_count(count: float) -> None:
    if count == 0:
        raise RunError("the total count of the batch is 0: there is nothing to average")
    if count < 0:
        raise RunError(
            f"the total count of the batch is {count:g}",
            legal="step returns (sum, count) with a count above 0",
        )
