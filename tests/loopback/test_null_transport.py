"""A rank alone over the null transport: every task runs, and no memory is made again."""

import math

import pytest
import torch
from examples import dense

import piper
from piper.bodies.leaves import batch_leaves
from piper.plan.tasks import Comm
from piper.plan.types import bind
from piper.runtime.launch.shares import share_of
from piper.runtime.transport.null import NullTransport
from piper.runtime.transport.transport import Exchange, Pending
from piper.runtime.worker.worker import Worker


class Recorded(NullTransport):
    def __init__(self) -> None:
        super().__init__()
        self.moved: list[tuple[str, tuple[int, ...]]] = []

    def start(
        self,
        exchange: Exchange,
        tensor: torch.Tensor | None,
        splits: list[list[int]] | None,
        into: torch.Tensor | None,
    ) -> Pending:
        pending = super().start(exchange, tensor, splits, into)
        assert pending.ready()
        places = tuple(result.data_ptr() for result in pending.finish())
        for result, slot in zip(pending.finish(), exchange.outputs, strict=True):
            assert tuple(result.shape) == slot.shape
        if exchange.outputs and exchange.outputs[0].base >= 0:
            places = ()  # a part of a sum, which each step makes
        self.moved.append((exchange.task.name, places))
        return pending


@pytest.mark.parametrize("zero", [0, 3])
def test_a_rank_alone_runs_all_of_its_tasks(zero: int) -> None:
    program = piper.trace(dense.model, dense.batch(), dense.step)
    strategy = piper.strategies.parallel(pp=2, dp=2, zero=zero, schedule="zbv", microbatches=4)
    job = program.apply(strategy).lower()
    me = bind(job.plan, 0)
    transport = Recorded()
    worker = Worker(job.plan, 0, bodies=job.bodies, transport=transport)
    leaves = share_of(job.plan, batch_leaves(dense.batch()), me.data_rank)
    assert math.isfinite(worker.step(leaves)["loss"])
    first = list(transport.moved)
    assert len(first) == sum(isinstance(t, Comm) for t in me.tasks)
    transport.moved.clear()
    worker.step(leaves)
    assert transport.moved == first
