"""Ten steps, a save, another strategy, number of ranks and launcher, ten steps: twenty of one device."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import piper
from piper.api.job import Job
from piper.strategies import parallel
from tests.procs.conftest import GetPool
from tests.resuming import losses_across_a_stop
from tests.zoo import CASES, Plain

pytestmark = [pytest.mark.xdist_group("procs"), pytest.mark.timeout(900)]

PIECES, HALF = 8, 10
CASE = CASES["deep_moe"]
STRATEGIES: dict[str, dict[str, Any]] = {
    "one": {},
    "dp2": {"dp": 2},
    "pp2": {"pp": 2},
    "pp3": {"pp": 3},
    "dp4 zero3": {"dp": 4, "zero": 3},
    "pp2 ep2 zero2": {"pp": 2, "dp": 2, "ep": 2, "zero": 2},
    "pp3 dp2 zero3 zbv": {"pp": 3, "dp": 2, "zero": 3, "schedule": "zbv"},
    "pp2 dp4 ep2 zero1": {"pp": 2, "dp": 4, "ep": 2, "zero": 1},
    "pp3 dualpipev": {"pp": 3, "schedule": "dualpipev"},
    "dp4 ep4 zero2": {"dp": 4, "ep": 4, "zero": 2},
}
PAIRS = [  # strategy and launcher before, and after
    ("pp2 dp4 ep2 zero1", "loopback", "pp3", "local"),  # 8 ranks, then 3
    ("pp3", "local", "dp4 zero3", "loopback"),  # then 4
    ("dp4 zero3", "local", "pp2 ep2 zero2", "local"),
    ("pp2 ep2 zero2", "loopback", "dp4 ep4 zero2", "local"),
    ("dp4 ep4 zero2", "loopback", "pp2", "loopback"),
    ("pp2", "local", "dp2", "local"),
    ("dp2", "local", "one", "single"),
    ("one", "single", "pp3 dp2 zero3 zbv", "local"),
    ("pp3 dp2 zero3 zbv", "local", "pp3 dualpipev", "loopback"),
    ("pp3 dualpipev", "local", "dp4 zero3", "local"),
    ("dp2", "loopback", "pp2 dp4 ep2 zero1", "loopback"),
    ("pp3 dp2 zero3 zbv", "loopback", "one", "single"),
]
RUN = PAIRS if os.environ.get("PIPER_LONG") else PAIRS[:2]


@cache
def _program() -> piper.Program:
    def make() -> torch.nn.Module:
        return Plain(num_stages=6).double()

    return piper.trace(make, CASE.batch(0), CASE.step)


@cache
def _job(name: str) -> Job:
    degrees = STRATEGIES[name]
    strategy = parallel(microbatches=PIECES // degrees.get("dp", 1), **degrees)
    return _program().apply(strategy).lower(optimizer=piper.adamw(lr=1e-2), clip=0.5)


@cache
def _one_device() -> list[float]:
    with _job("one").launch("single") as run:
        return [run.step(CASE.batch(seed)).loss for seed in range(2 * HALF)]


@pytest.mark.parametrize(("before", "there", "after", "here"), RUN)
def test_a_stop_does_not_show(
    tmp_path: Path, pool: GetPool, before: str, there: str, after: str, here: str
) -> None:
    def launcher(name: str, job: Job) -> Any:
        return pool(job.plan.mesh.size) if name == "local" else name

    batches = [CASE.batch(seed) for seed in range(2 * HALF)]
    losses = losses_across_a_stop(
        (_job(before), launcher(there, _job(before))),
        (_job(after), launcher(here, _job(after))),
        batches,
        tmp_path / "saved",
    )
    assert losses == pytest.approx(_one_device(), rel=1e-9)
