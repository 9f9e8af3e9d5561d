"""Law 1 with finer chunks: a tiny bucket_size cuts every stage into several pieces."""

from __future__ import annotations

from collections import Counter

import pytest

import piper
from piper.directives.schedule import Schedule
from piper.ir.graph import Graph
from piper.schedules import schedule
from piper.training.verify import compare
from tests.zoo import ADAMW, PIECES, batches_of, program_of, reference_of

SIZE = 512  # bytes, less than any linear layer has


def _strategy(*, pp: int, experts: bool) -> object:
    where = piper.where

    def strategy(s: Schedule) -> None:
        mesh = s.mesh(pp=pp, dp=2)
        for stage in range(2):
            s.place(where(PP=stage), mesh.at(pp=stage % pp))
        s.replicate(where(EP=None), over="dp", bucket_size=SIZE)
        if experts:
            s.shard(where(EP="*"), over="dp")
        s.split(where(), "MB", PIECES // 2)
        if pp > 1:
            s.order(schedule("1f1b", num_ranks=pp, num_microbatches=PIECES // 2))

    return strategy


def _pieces(graph: Graph) -> list[int]:
    """How many chunks each stage has for one microbatch."""
    found = [n for n in graph.chunks if n.phase == "F" and n.tag("MB") == 0]
    return list(Counter(node.tag("PP") for node in found).values())


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.xdist_group(n)) for n in ("dense", "moe", "tied", "skip")],
)
def test_trains_like_one_device(name: str, pp: int) -> None:
    program = program_of(name).apply(_strategy(pp=pp, experts=name != "dense"))
    job = program.lower(optimizer=ADAMW)
    assert min(_pieces(job.graph)) >= 4
    reference = reference_of(name, job)
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary, seed=7) as run:
            errors = compare(run, batches_of(name), reference)
        assert errors.exact, errors
