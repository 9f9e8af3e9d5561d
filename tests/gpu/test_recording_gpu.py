"""Recordings of NCCL ranks: a span per task by the device's own clock, and a profile of them."""

from __future__ import annotations

import pytest
import torch

from piper.insight.causes import Causes
from piper.insight.critical_path import critical_path
from piper.sim.simulate import simulate
from piper.training.profile import profile
from tests.gpu.conftest import GetPool
from tests.matrix import Cell
from tests.zoo import batches_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("gpu"),
]

CELLS = [
    Cell(0, "1f1b", "copied", "dense", dp=2),
    Cell(3, "zbv", "copied", "dense", dp=2),
    Cell(2, "dualpipev", "sharded", "moe", dp=2),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_task_has_a_span(pool: GetPool, cell: Cell) -> None:
    job = cell.job("cuda")
    batches = batches_of(cell.program)
    with job.launch(pool(4)) as run:
        plain = [run.step(batch).loss for batch in batches]
    with job.launch(pool(4)) as run:
        recording = run.record(len(batches))
        losses = [run.step(batch).loss for batch in batches]
    assert losses == pytest.approx(plain, rel=1e-9)
    timeline = recording.timeline
    plan = job.plan
    num = sum(len(part.tasks) * len(list(plan.mesh.ranks(part.slice))) for part in plan.classes)
    assert timeline.num_spans == len(batches) * num
    assert 0 < timeline.clock_error < 1e-3
    for track in timeline.tracks:
        last: dict[str, float] = {}
        for span in track:
            assert span.end >= span.start >= last.get(span.label.stream, 0.0) - 2e-6
            last[span.label.stream] = span.end
    for step in range(len(timeline.steps)):
        causes = Causes(plan, timeline, step)
        assert critical_path(causes).seconds == pytest.approx(causes.end - causes.begin)
    # What was received was not there before it was sent.
    ends = {
        (step, label.meeting): track.end[track.begins[step] + index]
        for track in timeline.tracks
        for index, label in enumerate(track.labels)
        for step in range(len(timeline.steps))
        if label.receives
    }
    late = timeline.clock_error
    for track in timeline.tracks:
        for index, label in enumerate(track.labels):
            for step, begin in enumerate(track.begins):
                end = ends.get((step, label.meeting))
                assert end is None or track.start[begin + index] <= end + late


def test_a_profile_of_a_card_that_ranks_share(pool: GetPool) -> None:
    cell = CELLS[1]
    job = cell.job("cuda")
    found = profile(job, batches_of(cell.program)[0], launch=pool(4), steps=3)
    assert found.machine.node.bandwidth > 1e8 and not found.machine.host_computes
    assert found.measured_seconds > 0 and found.predicted_seconds > 0
    num = simulate(job.plan, found.machine, by_rank=True).num_spans
    assert found.measured.num_spans == 3 * num
