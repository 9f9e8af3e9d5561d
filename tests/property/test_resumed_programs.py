"""Random pairs of strategies: what one run saves, the other has, bit for bit, and goes on with it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, note

from piper.api.job import Job
from piper.api.run import Run

from .models import batches, reference_of
from .programs import random_strategy
from .test_programs import EXAMPLES, RANDOM, ROWS, SPECS, profile


@pytest.mark.timeout(0 if EXAMPLES else 600)
@profile(10)
@given(RANDOM)
def test_any_strategy_goes_on_with_what_any_other_saved(rng: Random) -> None:
    first = random_strategy(rng, SPECS, ROWS)
    other = random_strategy(rng, [first.spec], ROWS)
    second = replace(other, clip=first.clip, late=first.late, groups=first.groups)
    note(f"{first!r}\nthen {second!r}")
    one, two, *_ = batches()
    with tempfile.TemporaryDirectory() as folder:
        before = first.lower()
        with before.launch("loopback") as run:
            run.step(one)
            run.save(folder)
            kept = _everything(run)
        job = second.lower()
        with job.resume(folder, "loopback") as run:
            found = _everything(run)
            assert found.keys() == kept.keys()
            assert [name for name in kept if not torch.equal(kept[name], found[name])] == []
            loss = run.step(two).loss
            assert run.differing_replicas() == []
    if _pieces(before) == _pieces(job):
        wanted = reference_of(first.spec, job).losses[1]
        assert loss == pytest.approx(wanted, rel=1e-9)


def _pieces(job: Job) -> int:
    """Global microbatches: as many draw the same random numbers."""
    return job.plan.num_data_ranks * job.plan.num_microbatches


def _everything(run: Run) -> dict[str, torch.Tensor]:
    state = {f"{n}:{k}": t for n, kept in run.optimizer_state().items() for k, t in kept.items()}
    return {**run.parameters(), **run.buffers(), **state}
