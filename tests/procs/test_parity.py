"""Law 1 on real processes: 2 and 4 ranks over gloo."""

import pytest
import torch

from piper import Schedule, where
from piper.passes.physical.route import Route
from piper.training.verify import compare, train_one_device
from tests.loopback.test_param_groups import by_module
from tests.matrix import AXES, EXPERTS, MODEL, SCHEDULE, ZERO, Cell
from tests.null.test_outside_directive import Speak
from tests.procs.conftest import GetPool
from tests.strategies import strategy_of
from tests.zoo import ADAMW, batches_of, program_of, reference_of

pytestmark = pytest.mark.xdist_group("procs")


def _cell(number: int) -> Cell:
    """Every axis turns at its own pace, so that a few cases have all values."""
    model = MODEL[number % len(MODEL)]
    experts = EXPERTS[(number // len(ZERO) + number) % 2] if model != "dense" else "copied"
    return Cell(number % len(ZERO), SCHEDULE[number % len(SCHEDULE)], experts, model, dp=2)


CASES = [_cell(number) for number in range(24)]
OTHERS = [
    (2, "integers", "pp2", "1f1b"),
    (2, "counted", "ep2", "none"),
    (2, "untagged", "pp2", "dualpipe"),
    (4, "deep", "pp4", "eager_1f1b"),
]


@pytest.mark.parametrize("cell", CASES, ids=[f"{c.num_ranks}-{c.name}" for c in CASES])
def test_trains_like_one_device(pool: GetPool, cell: Cell) -> None:
    job = cell.job()
    with job.launch(pool(cell.num_ranks)) as run:
        errors = compare(run, batches_of(cell.program), reference_of(cell.program, job))
    assert errors.exact, errors


@pytest.mark.parametrize(("size", "name", "degrees", "schedule"), OTHERS)
def test_other_models_train_like_one_device(
    pool: GetPool, size: int, name: str, degrees: str, schedule: str
) -> None:
    job = program_of(name).apply(strategy_of(degrees, schedule)).lower(optimizer=ADAMW)
    with job.launch(pool(size)) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


def test_a_host_reads_behind_all_that_its_stream_has(
    pool: GetPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a stream of exchanges, as for a device: what comes after the read waits for none of them."""
    monkeypatch.setattr(Route, "_reading", lambda route, draft: "exchange")
    job = program_of("counted").apply(strategy_of("ep2", "none")).lower(optimizer=ADAMW)
    reads = [task for part in job.plan.classes for task in part.tasks if task.kind == "read"]
    assert reads and {job.plan.streams[task.stream].name for task in reads} == {"exchange"}
    with job.launch(pool(2)) as run:
        errors = compare(run, batches_of("counted"), reference_of("counted", job))
    assert errors.exact, errors


def test_groups_averages_and_rates_of_groups(pool: GetPool) -> None:
    """What is said of each parameter group travels to the processes, with the plan and with steps."""
    strategy = strategy_of("pp2_dp2", "1f1b", zero=3, bucket_size="1KiB")
    job = program_of("tied").apply(strategy).lower(optimizer=by_module, ema=0.5)
    batches = batches_of("tied")
    with job.launch(pool(4)) as run, job.launch("loopback") as other:
        errors = compare(run, batches, train_one_device(job, batches))
        compare(other, batches, train_one_device(job, batches))
        for each in (run, other):
            each.set_options([{"lr": 0.0}, {}, {"lr": 0.0}, {"lr": 0.3}])
            each.step(batches[0])
        assert errors.exact, errors
        averages, state = other.ema(), other.optimizer_state()
        for name, average in run.ema().items():
            torch.testing.assert_close(average, averages[name], rtol=1e-10, atol=1e-12)
        assert {n: s.keys() for n, s in run.optimizer_state().items()} == {
            n: s.keys() for n, s in state.items()
        }


def test_workers_need_not_know_the_directives_of_a_strategy(pool: GetPool) -> None:
    """This one is defined in a test; workers have only the plan."""

    def strategy(s: Schedule) -> None:
        mesh = s.mesh(pp=2)
        s.stream("fast")
        for stage in range(2):
            s.place(where(PP=stage), mesh.at(pp=stage))
        s.speak(where(PP=1), on="fast")
        s.split(where(), "MB", 8)

    job = program_of("moe").apply(strategy).lower(optimizer=ADAMW)
    assert isinstance(job.plan.history[4].directive, Speak)
    with job.launch(pool(2)) as run:
        errors = compare(run, batches_of("moe"), reference_of("moe", job))
    assert errors.exact, errors


def test_every_value_is_covered() -> None:
    for axis, values in AXES.items():
        assert {getattr(cell, axis) for cell in CASES} == set(values)
    whole = {c.zero for c in CASES if c.experts == "sharded" and c.schedule != "none"}
    assert whole == set(ZERO)
    assert {cell.num_ranks for cell in CASES} == {2, 4}
