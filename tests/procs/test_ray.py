"""Law 1 on a Ray cluster of two nodes, where ranks are placed, and how actors fail and start again.

The nodes are two raylets on this machine."""

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch

from piper.api.job import Job
from piper.cli.main import main
from piper.errors import RunError
from piper.mesh import Mesh
from piper.runtime.launch.ray import ray_cluster, ray_pool
from piper.runtime.launch.ray.ray_pool import RayPool
from piper.training.verify import compare
from tests.matrix import Cell
from tests.procs.elastic_training import ElasticTraining, undisturbed
from tests.procs.test_parity import CASES as PARITY
from tests.recorded import check_measured
from tests.strategies import strategy_of
from tests.zoo import ADAMW, CASES, batches_of, program_of, reference_of

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.timeout(300)]
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install '.[ray]'",
)
MESH = Mesh((("pp", 2), ("dp", 2)))
ROOT = Path(__file__).parents[2]
CELLS = [
    Cell(2, "zb_h1", "sharded", "moe", dp=2),
    Cell(3, "1f1b", "sharded", "tied", dp=2),
]
if "PIPER_LONG" in os.environ:  # all cases of four ranks, which takes minutes
    CELLS += [cell for cell in PARITY if cell.num_ranks == 4]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of two nodes with two CPUs each."""
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=options)
    try:
        made.add_node(**options)
        made.wait_for_nodes()
        yield made.address
    finally:
        import ray

        ray.shutdown()
        made.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def kept(cluster: str) -> Iterator[RayPool]:
    """Four ranks, kept alive."""
    with RayPool(4, address=cluster, mesh=MESH, spread="pp", timeout=30) as made:
        yield made


@pytest.fixture
def pool(kept: RayPool) -> RayPool:
    """Other ones, where a test has failed after it ended them."""
    if not kept.alive:
        kept.restart()
    return kept


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _soon(true: Callable[[], bool], seconds: float = 30) -> bool:  # of Ray, on a busy machine
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.1)
    return true()


@cache
def _job(strategy: str = "pp2_dp2", schedule: str = "1f1b") -> Job:
    return program_of("dense").apply(strategy_of(strategy, schedule)).lower(optimizer=ADAMW)


@needs_ray  # the first test, as long as no pool fills the cluster
@pytest.mark.timeout(900)
def test_actors_that_are_lost_do_not_show_in_training(cluster: str, tmp_path: Path) -> None:
    kills = 15 if "PIPER_LONG" in os.environ else 1
    steps, chance = 100 * (kills + 1), Random(0)
    arguments = ["--dp", "2", "--microbatches", "2", "--steps", str(steps), "--every", "25"]
    run = ElasticTraining(tmp_path, *arguments, "--address", cluster, launcher="ray")
    for _ in range(kills):
        run.lose(chance)
    run.end()
    found = run.losses()
    assert sorted(found) == list(range(1, steps + 1))
    assert found == pytest.approx(undisturbed(steps, microbatches=4), rel=1e-5)
    seconds = [float(text.split()[2]) for text in run.notes("went on")]
    print(f"Ray: {kills} losses, went on after {min(seconds)} to {max(seconds)} s")


@needs_ray  # without a pool, too
def test_the_last_lesson_runs_on_a_cluster(cluster: str) -> None:
    done = subprocess.run(
        [sys.executable, "examples/lessons/10_more_machines.py", "ray"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=200,
        check=False,
        env={**os.environ, "RAY_ADDRESS": cluster},
    )
    assert done.returncode == 0, done.stderr
    losses = re.search(r"started by ray: (\[.*\])", done.stdout)
    page = (ROOT / "docs" / "lessons" / "10_more_machines.md").read_text()
    assert losses and losses[1] in page


@needs_ray
@pytest.mark.parametrize("cell", CELLS, ids=[cell.name for cell in CELLS])
def test_trains_like_one_device_on_two_nodes(pool: RayPool, cell: Cell) -> None:
    assert cell.num_ranks == 4
    assert pool.nodes[0] != pool.nodes[2] and pool.nodes[1] != pool.nodes[3]  # spread
    job = cell.job()
    with job.launch(pool) as run:
        errors = compare(run, batches_of(cell.program), reference_of(cell.program, job))
    assert errors.exact, errors


@needs_ray
def test_steps_on_a_cluster_are_recorded(pool: RayPool) -> None:
    job, batches = CELLS[0].job(), batches_of(CELLS[0].program)
    with job.launch(pool) as run, run.record() as recording:
        for batch in batches[:2]:
            run.step(batch)
    check_measured(recording.timeline, job.plan, steps=2)


@needs_ray
def test_a_state_dict_reaches_the_nodes_and_goes_out(pool: RayPool, tmp_path: Path) -> None:
    program = program_of("dense").apply(strategy_of("pp2_dp2", "1f1b"))
    state = program.source.make_model().state_dict()
    with program.lower(optimizer=ADAMW, weights=state).launch(pool) as run:
        found = run.state_dict()
        run.save_weights(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    with program.lower(optimizer=ADAMW, weights=tmp_path).launch(pool) as run:
        found = run.state_dict()
        assert sum(run.bytes_read()) >= sum(tensor.numel() * 8 for tensor in state.values())
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@needs_ray
def test_a_saved_run_goes_on_on_a_cluster_and_back(pool: RayPool, tmp_path: Path) -> None:
    batches = [*batches_of("dense"), *batches_of("dense")]
    wanted = _job("dp2", "none")
    with wanted.launch("loopback") as run:
        losses = [run.step(batch).loss for batch in batches]
    with wanted.launch("loopback") as run:
        found = [run.step(batch).loss for batch in batches[:2]]
        run.save(tmp_path / "first")
    with _job().resume(tmp_path / "first", pool) as run:
        found += [run.step(batch).loss for batch in batches[2:4]]
        run.save(tmp_path / "second")
    with wanted.resume(tmp_path / "second", "loopback") as run:
        found += [run.step(batch).loss for batch in batches[4:]]
    assert found == pytest.approx(losses, rel=1e-9)


@needs_ray
def test_a_killed_actor_is_named_and_others_start_in_its_place(pool: RayPool) -> None:
    job, batch = _job(), CASES["dense"].batch(0)
    pids, nodes = pool.processes, pool.nodes
    with job.launch(pool) as run:
        loss = run.step(batch).loss
        os.kill(pids[2], signal.SIGKILL)
        with pytest.raises(
            RunError, match=r"^rank 2 died, last seen after step 1: its worker process has died"
        ) as caught:
            run.step(batch)
    assert any("rank 0 waited for rank 2 in " in line for line in caught.value.details)
    assert not pool.alive
    assert _soon(lambda: all(_gone(pid) for pid in pids))
    with pytest.raises(RunError, match="the actors have ended"):
        job.launch(pool)
    pool.restart()
    assert pool.nodes == nodes
    with job.launch(pool) as run:
        assert run.step(batch).loss == loss


@needs_ray
def test_a_cluster_without_room_says_what_there_is(
    cluster: str, pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "PLACE_SECONDS", 1.0)
    with pytest.raises(RunError, match="no room for 2 ranks") as caught:
        RayPool(2, address=cluster)
    assert caught.value.details == ("CPU: 2 asked for, 4 on 2 nodes, 0 of them free",)
    assert pool.alive


@needs_ray
def test_an_actor_that_stops_is_named_and_ends(pool: RayPool) -> None:
    pids = pool.processes
    batch = CASES["dense"].batch(0)
    with _job().launch(pool) as run:
        run.step(batch)
        pool.timeout = 3.0
        os.kill(pids[3], signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(RunError) as caught:
            run.step(batch)
    assert time.monotonic() - started < 15
    assert caught.value.message == "rank 3 hangs after step 1: its process has not run for 3 s"
    assert any("rank 1 waited for rank 3 in " in line for line in caught.value.details)
    assert _soon(lambda: all(_gone(pid) for pid in pids))
    pool.close()


@needs_ray
def test_a_run_fails_near_an_axis_and_leaves_nothing_behind(cluster: str) -> None:
    import ray

    ray.init(address=cluster, logging_level="warning")
    seen = []
    job = _job("pp2")
    run = job.launch("ray", near="pp", report=lambda rank, text: seen.append((rank, text)))
    pool = run.workers.pool  # type: ignore[attr-defined]
    pids = pool.processes
    assert sorted(r for r, text in seen if text.startswith("is up: process ")) == [0, 1]
    assert pool.nodes[0] == pool.nodes[1]
    batch = CASES["dense"].batch(0)
    run.step(batch)
    batch["tokens"] += 1000  # outside of the embedding
    with pytest.raises(RunError) as caught:
        run.step(batch)
    assert "rank 0 failed in F[PP=0,MB=0] of step 2, from place (tests/" in str(caught.value)
    assert ": IndexError" in str(caught.value)
    groups = ray.util.placement_group_table().values()
    assert {group["state"] for group in groups} == {"REMOVED"}
    assert _soon(lambda: ray.available_resources().get("CPU") == 4)
    assert _soon(lambda: all(_gone(pid) for pid in pids))
    with pytest.raises(RunError, match="is connected to the Ray cluster at"):
        job.launch("ray", address="127.0.0.1:1")
    assert ray.is_initialized()  # the connection was not made by the run
    ray.shutdown()


@needs_ray
def test_piper_train_on_a_cluster_is_that_on_local_processes(
    cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(Path(__file__).with_name("tiny.py"))  # it has data(share) and validation(share)
    arguments = ["train", file, "--dp", "2", "--zero", "2", "--steps", "3", "--json"]
    found = []
    for launch in (["local"], ["ray", "--address", cluster, "--spread", "dp"]):
        assert main([*arguments, "--launch", *launch]) == 0
        lines = capsys.readouterr().out.splitlines()
        found.append([json.loads(line) for line in lines if line.startswith("{")])
    local, ray = ([(e["event"], e["loss"]) for e in events if "loss" in e] for events in found)
    assert [event for event, _ in local] == ["step", "step", "step", "evaluation", "end"]
    assert ray == local
    up = [event["text"] for event in found[1] if event["event"] == "launch"]
    nodes = [re.search(r"on node (\w+)", text) for text in up]
    assert len({node[1] for node in nodes if node}) == 2


@needs_ray
def test_a_cluster_of_its_own_ends_with_the_pool() -> None:
    import ray

    with _job("one", "none").launch("ray", address="local") as run:
        address = ray.get_runtime_context().gcs_address
        assert run.step(CASES["dense"].batch(0)).loss > 0
    assert not ray.is_initialized()
    assert _soon(lambda: not ray_cluster._answers(address))


@needs_ray
def test_what_answers_but_is_no_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "CHECK_SECONDS", 1.0)
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(RunError, match=f"no Ray cluster at {address}: what answers"):
            RayPool(2, address=address)


@needs_ray
@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_an_address_without_a_cluster_is_refused_soon(address: str) -> None:
    started = time.monotonic()
    with pytest.raises(RunError, match=f"no Ray cluster at {address}") as caught:
        _job().launch("ray", address=address)
    assert "HOST:PORT" in str(caught.value.legal)
    assert time.monotonic() - started < 20


def test_an_axis_that_is_none_is_refused() -> None:
    with pytest.raises(RunError, match="near='tp' is no axis of the mesh") as caught:
        _job().launch("ray", near="tp")
    assert caught.value.legal == "pp, dp, ep"


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match="Ray is not there") as caught:
        ray_cluster.load_ray()
    assert caught.value.legal == "pip install '.[ray]' in a clone of Piper"
