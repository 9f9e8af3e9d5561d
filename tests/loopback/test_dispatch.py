"""What is proved is what is dispatched: a rank starts its tasks in the plan's order."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from piper.bodies.leaves import batch_leaves
from piper.plan.types import bind
from piper.runtime.launch.shares import share_of
from piper.runtime.order.host_order import HostOrder
from piper.runtime.transport.null import NullTransport
from piper.runtime.transport.transport import Pending
from piper.runtime.worker import worker as worker_file
from piper.runtime.worker.worker import Worker
from tests.matrix import Cell
from tests.zoo import batches_of

CELLS = [Cell(0, "1f1b", "copied", "skips", pp=4), Cell(2, "dualpipev", "copied", "moe")]
Start = Callable[[], Pending | None]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_tasks_start_in_the_order_of_the_plan(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def noting(name: str, start: Start) -> Start:
        def noted() -> Pending | None:
            started.append(name)
            return start()

        return noted

    def noting_order(worker: Worker) -> HostOrder:
        names = [task.name for task in worker.me.tasks]
        worker.starts = [noting(*pair) for pair in zip(names, worker.starts, strict=True)]
        return HostOrder(worker)

    monkeypatch.setattr(worker_file, "HostOrder", noting_order)
    job = cell.job()
    for rank_class in job.plan.classes:
        rank = next(iter(job.plan.mesh.ranks(rank_class.slice)))
        me = bind(job.plan, rank)
        worker = Worker(job.plan, rank, bodies=job.bodies, transport=NullTransport())
        batch = next(iter(batches_of(cell.program)))
        worker.step(share_of(job.plan, batch_leaves(batch), me.data_rank))
        assert started == [task.name for task in rank_class.tasks]
        assert any(task.kind == "send" for task in rank_class.tasks)
        started.clear()
