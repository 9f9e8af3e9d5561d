"""Links that carry two exchanges faster than one have two lanes; what is trained stays the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import msgspec
import pytest

from piper import Schedule, where
from piper.api.job import Job
from piper.cost.estimate import NOMINAL
from piper.cost.machine import Link, Machine
from piper.plan.tasks import Comm, microbatch_of
from piper.plan.under_way import most_under_way
from piper.strategies import parallel
from piper.training.verify import compare
from tests import tensor_zoo
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.xdist_group("lanes")


def shared_link(lanes: float = 1.5, bandwidth: float = 1e9) -> Machine:
    link = Link(1e-5, bandwidth)
    return msgspec.structs.replace(NOMINAL, lanes=lanes, node=link, network=link)


def _job(machine: Machine | None, zero: int = 3, schedule: str = "1f1b", ep: int = 1) -> Job:
    strategy = parallel(
        pp=2, dp=2, ep=ep, zero=zero, microbatches=4, schedule=schedule, bucket_size=300
    )
    name = "deep_moe" if ep > 1 else "deep"
    return program_of(name).apply(strategy).lower(optimizer=ADAMW, machine=machine)


def _names(job: Job) -> set[str]:
    return {stream.name for stream in job.plan.streams}


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_buckets_take_turns_on_two_lanes(zero: int, adversary: bool) -> None:
    job = _job(shared_link(), zero)
    wanted = {"reduce", "reduce:1"} | ({"gather", "gather:1"} if zero else set())
    assert wanted <= _names(job)
    with job.launch("loopback", adversary=adversary, seed=zero) as run:
        errors = compare(run, batches_of("deep"), reference_of("deep", job))
    assert errors.exact, errors


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize("degrees", [{"tp": 2}, {"tp": 2, "sp": True}, {"cp": 2}], ids=str)
def test_microbatches_take_turns_where_tensors_are_cut(
    degrees: dict[str, Any], adversary: bool
) -> None:
    """What a microbatch exchanges goes on beside what the next one does; two of them take turns."""
    strategy = parallel(dp=2, microbatches=4, **degrees)
    program = tensor_zoo.program_of("rms").apply(strategy)
    machine = shared_link(bandwidth=1e6)
    job = program.lower(optimizer=ADAMW, machine=machine)
    (part,) = job.plan.classes
    of_stream: dict[str, set[int]] = defaultdict(set)
    for task in part.tasks:
        if isinstance(task, Comm) and task.tags:
            stream = job.plan.streams[task.stream].name
            of_stream[stream].add(microbatch_of(task, ["MB"])[0])
    assert of_stream["tensor"] == {0, 2} and of_stream["tensor:1"] == {1, 3}
    assert most_under_way(part.tasks, ["MB"])[0] == 2
    with job.launch("loopback", adversary=adversary) as run:
        reference = tensor_zoo.reference_of("rms", job)
        errors = compare(run, tensor_zoo.batches_of("rms"), reference)
    assert errors.exact, errors


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
def test_backwards_have_a_lane_of_experts(adversary: bool) -> None:
    job = _job(shared_link(), 2, "dualpipev", ep=2)
    assert {"exchange", "exchange:1"} <= _names(job)
    for part in job.plan.classes:
        for task in part.tasks:
            if task.kind == "all_to_all":
                back = job.plan.streams[task.stream].name == "exchange:1"
                assert back == ("B[" in task.name or "BI[" in task.name), task.name
    back = next(t.name for p in job.plan.classes for t in p.tasks if t.name.startswith("rows0t0>B"))
    assert "no wait: the host dispatches nothing before it has read" in job.explain(back)
    with job.launch("loopback", adversary=adversary, seed=5) as run:
        errors = compare(run, batches_of("deep_moe"), reference_of("deep_moe", job))
    assert errors.exact, errors


def _by_stream(job: Job, kind: str) -> Counter[str]:
    tasks = [task for part in job.plan.classes for task in part.tasks if isinstance(task, Comm)]
    return Counter(job.plan.streams[t.stream].name for t in tasks if t.comm == kind)


@pytest.mark.parametrize("ep", [1, 2])
def test_lanes_are_used_alike(ep: int) -> None:
    """Also beside buckets that no rank has a copy of, which talk to nobody."""
    strategy = parallel(dp=2, ep=ep, zero=1, microbatches=4)
    job = program_of("deep_moe").apply(strategy).lower(optimizer=ADAMW, machine=shared_link())
    for kind, stream in (("reduce_scatter", "reduce"), ("all_gather", "gather")):
        used = _by_stream(job, kind)
        assert used.keys() == {stream, f"{stream}:1"}
        assert abs(used[stream] - used[f"{stream}:1"]) <= 1


def test_one_lane_where_two_gain_little() -> None:
    for machine in (None, shared_link(lanes=1.2)):
        assert not any(":" in name for name in _names(_job(machine)))


@pytest.mark.parametrize("name", ["mine", "reduce"])
def test_a_stream_that_is_named_is_one_queue(name: str) -> None:
    def strategy(s: Schedule) -> None:
        mesh = s.mesh(dp=2)
        s.place(where(), mesh.at())
        s.replicate(where(), over="dp", zero=1, reduce_stream=s.stream(name), bucket_size=300)
        s.split(where(), "MB", 4)

    job = program_of("deep").apply(strategy).lower(optimizer=ADAMW, machine=shared_link())
    assert name in _names(job) and f"{name}:1" not in _names(job)
    assert {"gather", "gather:1"} <= _names(job)
