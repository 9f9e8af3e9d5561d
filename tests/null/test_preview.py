"""preview: the communication that is foreseen is the communication that lowering makes."""

from collections import Counter

import pytest

import piper
from piper import Schedule, where
from piper.api.program import Program
from piper.strategies import parallel
from tests.strategies import strategy_of
from tests.zoo import CASES, program_of

STRATEGIES = [
    ("one", "none"), ("dp2", "none"), ("ep2", "none"), ("pp2", "1f1b"), ("pp2_ep2", "zb_h1"),
    ("pp2_dp2_ep2", "1f1b"),
]  # fmt: skip
MATRIX = [
    pytest.param(name, *chosen, id=f"{name}-{chosen[0]}", marks=pytest.mark.xdist_group(name))
    for name, case in CASES.items()
    for chosen in STRATEGIES
    if case.experts or "ep" not in chosen[0]
]


def foreseen(program: Program) -> Counter[tuple[int, str]]:
    found: Counter[tuple[int, str]] = Counter()
    for item in program.foreseen():
        for kind, count in item.comms:
            found[item.origin, kind] += count
    return found


@pytest.mark.parametrize(("name", "strategy", "schedule"), MATRIX)
def test_counts_per_directive_and_kind(name: str, strategy: str, schedule: str) -> None:
    program = program_of(name).apply(strategy_of(strategy, schedule))
    made = Counter((comm.origin, comm.comm) for comm in program.lower().graph.comms)
    assert foreseen(program) == made


@pytest.mark.xdist_group("tied")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_counts_of_sharded_state(zero: int) -> None:
    """Gathers under ZeRO 3 are foreseen as if every backward read its parameters."""
    program = program_of("tied").apply(
        parallel(pp=2, dp=4, ep=2, zero=zero, microbatches=2, bucket_size=300, schedule="zb_h1")
    )
    made = Counter((comm.origin, comm.comm) for comm in program.lower().graph.comms)
    seen = foreseen(program)
    assert made.keys() == seen.keys()
    for (origin, kind), count in made.items():
        if zero == 3 and kind == "all_gather":
            assert 0.6 * seen[origin, kind] <= count <= seen[origin, kind]
        else:
            assert count == seen[origin, kind], (origin, kind)


def by_stage(s: Schedule) -> None:
    """A directive per stage, streams with names, and experts of the first stage only."""
    mesh = s.mesh(pp=2, dp=2)
    dp, pp = s.stream("dp"), s.stream("pp")
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage), stream=pp)
    s.shard(where(PP=0, EP="*"), over="dp")
    s.replicate(where(PP=0, EP=None), over="dp", reduce_stream=dp)
    s.replicate(where(PP=1), over="dp", reduce_stream=dp)
    s.split(where(), "MB", 4)


@pytest.mark.xdist_group("moe")
def test_text() -> None:
    program = program_of("moe").apply(by_stage)
    assert foreseen(program) == Counter(
        (comm.origin, comm.comm) for comm in program.lower().graph.comms
    )
    lines = [line.split("  (")[0] for line in program.preview().splitlines()]
    assert lines == [
        "s.place(where(PP=0), mesh.at(pp=0), stream='pp')",
        "    send/recv of gradient of %x_3 (512 B) pp=1 -> pp=0 on stream pp:pp=1>pp=0, "
        "once per microbatch",
        "s.place(where(PP=1), mesh.at(pp=1), stream='pp')",
        "    send/recv of %x_3 (512 B) pp=0 -> pp=1 on stream pp:pp=0>pp=1, once per microbatch",
        "s.shard(where(PP=0, EP='*'), over='dp')",
        "    all_to_all over dp at pp=0 on stream exchange: 12 forward and 8 backward for 1 region x "
        "4 microbatches; in each microbatch counts 32 B, rows there 512 B, rows back 512 B, "
        "gradients there 512 B, gradients back 512 B",
        "s.replicate(where(PP=0, EP=None), over='dp', reduce_stream='dp')",
        "    all_reduce of gradients, 1 in 1 buckets of up to 3.3 KiB, over dp at pp=0 on stream dp",
        "s.replicate(where(PP=1), over='dp', reduce_stream='dp')",
        "    all_reduce of gradients, 1 in 1 buckets of up to 9.3 KiB, over dp at pp=1 on stream dp",
        "whatever the strategy",
        "    all_reduce of the loss over pp=0|pp=1 and dp on stream scalars, once",
        "no communication: mesh, 2 stream, split",
    ]


@pytest.mark.xdist_group("moe")
def test_bytes_are_those_of_the_lowered_graph() -> None:
    program = program_of("moe").apply(by_stage)
    graph = program.lower().graph
    reduced = next(c for c in graph.comms if c.comm == "all_reduce" and c.stream == "dp")
    size = sum(graph.values[name].nbytes for name in reduced.inputs)
    assert f"up to {size / 1024:.1f} KiB, over dp at {reduced.slice}" in program.preview()
    sent = next(c for c in graph.comms if c.comm == "send")
    assert f"({graph.values[sent.inputs[0]].nbytes} B) pp=0 -> pp=1" in program.preview()


@pytest.mark.xdist_group("moe")
def test_one_device_has_nothing_to_say() -> None:
    assert program_of("moe").preview() == "no communication"
    with pytest.raises(piper.PiperError, match="does not divide"):
        program_of("moe").apply(lambda s: s.split(where(), "MB", 5)).preview()
