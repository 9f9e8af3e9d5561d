"""Profiles of real processes: a machine is measured, steps are recorded, and held to a prediction."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from piper.__main__ import main
from piper.cost.machine_file import load_machine
from piper.insight.predictions import IDLE
from piper.observe.timeline_files import load_timeline
from piper.sim.simulate import simulate
from piper.strategies import parallel
from piper.training.profile import collective_groups, profile
from tests.procs.conftest import GetPool
from tests.zoo import ADAMW, batches_of, program_of

pytestmark = pytest.mark.xdist_group("procs")

DENSE = str(Path(__file__).parents[2] / "examples" / "dense.py")


def test_every_task_is_predicted_and_measured(pool: GetPool) -> None:
    strategy = parallel(pp=2, dp=2, zero=3, schedule="zbv", microbatches=4)
    job = program_of("deep_dense").apply(strategy).lower(optimizer=ADAMW)
    found = profile(job, batches_of("deep_dense")[0], launch=pool(4), steps=3)
    machine = found.machine
    kinds = {kind.partition("/")[0] for kind in machine.exchanges}
    assert kinds >= {"send", "all_reduce", "reduce_scatter", "all_gather", "all_to_all"}
    for linear in machine.kinds.values():
        assert linear.fixed >= 0 and linear.per_byte >= 0
        assert linear(1 << 20) > 0
    assert machine.node.bandwidth > 1e6 and 0 < machine.exchange < 0.1
    plan = job.plan
    used = {
        task.body
        for part in plan.classes
        for task in part.tasks
        if getattr(task, "body", "") and task.kind == "run"
    }
    assert used and used <= machine.bodies.keys()
    assert all(seconds > 0 for seconds in machine.bodies.values())
    counts = Counter(
        getattr(task, "phase", "") or task.kind
        for part in plan.classes
        for task in part.tasks
        for _ in plan.mesh.ranks(part.slice)
    )
    assert {each.kind: each.tasks for each in found.kinds if each.kind != IDLE} == counts
    num = sum(counts.values())
    assert found.measured.num_spans == 3 * num
    assert simulate(plan, machine, by_rank=True).num_spans == num
    assert found.measured_seconds > 0 and found.predicted_seconds > 0
    assert all(track.memory for track in (*found.measured.tracks, *found.predicted.tracks))
    sizes = {f"all_gather/{size}" for size in (2, 4)}  # data ranks; all ranks, for the loss
    assert sizes <= machine.exchanges.keys()
    again = profile(job, batches_of("deep_dense")[0], launch=pool(4), steps=1, machine=machine)
    assert again.machine == machine
    assert again.predicted_seconds == found.predicted_seconds


def test_links_are_measured_in_the_groups_of_collectives() -> None:
    def groups(**degrees: Any) -> dict[int, list[tuple[int, ...]]]:
        job = program_of("deep_dense").apply(parallel(**degrees)).lower(optimizer=ADAMW)
        return {len(found[0]): found for found in collective_groups(job.plan)}

    found = groups(pp=4, dp=2, zero=1, microbatches=4)
    assert found == {8: [tuple(range(8))], 2: [(0, 1), (2, 3), (4, 5), (6, 7)]}
    found = groups(pp=2, dp=4, zero=3, microbatches=2)
    assert found == {8: [tuple(range(8))], 4: [(0, 1, 2, 3), (4, 5, 6, 7)]}


def test_ranks_of_no_group_wait_while_links_are_measured(pool: GetPool) -> None:
    asked: list[list[tuple[int, ...]]] = [[(0, 1)]]
    times = pool(3).call("links", [asked] * 3)
    kinds = {(each.kind, each.ranks, each.across) for each in times[0].exchanges}
    collectives = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    assert kinds == {("send", 2, False), *((kind, 2, False) for kind in collectives)}
    assert times[0].exchanges == times[2].exchanges and times[0].issue > 0
    assert all(0 <= share < 1 for share in times[0].shares.values())
    assert all(each.seconds > 0 for each in times[0].exchanges)


def test_a_loss_with_a_count_is_rehearsed(pool: GetPool) -> None:
    """Nobody has counted targets where nothing is moved."""
    job = program_of("counted").apply(parallel(pp=2, microbatches=4)).lower(optimizer=ADAMW)
    found = job.rehearse(batches_of("counted")[0], pool(2), steps=2)
    assert len(found.steps) == 2 and found.num_spans == 2 * sum(len(t.labels) for t in found.tracks)


def test_the_command_keeps_what_it_has_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, record = tmp_path / "machine.json", tmp_path / "run.timeline"
    command = ["profile", DENSE, "--pp", "2", "--microbatches", "4", "--steps", "2"]
    assert main([*command, "--out", str(kept), "--record", str(record), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["measured_seconds"] > 0 and {"F", "B", IDLE} <= {k["kind"] for k in found["kinds"]}
    assert load_machine(kept).bodies and load_timeline(record).source == "measured"
    assert main([*command, "--machine", str(kept)]) == 0
    assert "likely reason" in capsys.readouterr().out
    assert (
        main(["simulate", DENSE, "--pp", "2", "--microbatches", "4", "--machine", str(kept)]) == 0
    )
    said = capsys.readouterr().out
    assert said.startswith("machine cpu, 64 ranks a node: calibrated; what was not measured: ")
    assert "\nsimulated step: " in said
    for wrong, error in (
        (["--out", "machine.txt"], "OptionError: --out machine.txt"),
        (["--steps", "0"], "OptionError: --steps 0"),
        (["--record", "run.pdf"], "FileError: "),
    ):
        assert main([*command, *wrong]) == 2
        assert capsys.readouterr().err.startswith(error)
