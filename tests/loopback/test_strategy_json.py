"""A strategy in the published JSON form trains like one device."""

from pathlib import Path

import pytest

import piper
from piper import Schedule, where
from piper.strategies import from_json
from piper.training.verify import compare, train_one_device
from tests.zoo import ADAMW, batches_of, program_of

FILE = Path(__file__).parents[1] / "null" / "strategies_json" / "two_stages.json"


@pytest.mark.xdist_group("moe")
@pytest.mark.parametrize("adversary", [False, True])
def test_the_example_trains_like_one_device(adversary: bool) -> None:
    job = program_of("moe").apply(from_json(FILE)).lower(optimizer=ADAMW)
    reference = train_one_device(job, batches_of("moe"))
    with job.launch("loopback", adversary=adversary, seed=3) as run:
        errors = compare(run, batches_of("moe"), reference)
    assert errors.exact, errors


@pytest.mark.xdist_group("deep")
def test_all_messages_on_one_stream() -> None:
    """Both directions and all stages share a queue, and messages still meet in order."""

    def strategy(s: Schedule) -> None:
        mesh = s.mesh(pp=2, dp=2)
        one = s.stream("one")
        for stage in range(4):
            s.place(where(PP=stage), mesh.at(pp=stage % 2), stream=one)
        s.replicate(where(), over="dp", reduce_stream=one)
        s.split(where(), "MB", 4)
        sizes = {"num_ranks": 2, "num_microbatches": 4, "stages_per_rank": 2}
        s.order(piper.schedules.interleaved_1f1b(**sizes))

    job = program_of("deep").apply(strategy).lower(optimizer=ADAMW)
    used = {c.stream for c in job.graph.comms if c.comm in ("send", "recv")}
    assert used == {"one:pp=0>pp=1", "one:pp=1>pp=0"}
    reference = train_one_device(job, batches_of("deep"))
    for seed in range(2):
        with job.launch("loopback", adversary=True, seed=seed) as run:
            errors = compare(run, batches_of("deep"), reference)
        assert errors.exact, errors
