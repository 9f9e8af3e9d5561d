"""Law 1 on real processes: 2 and 4 ranks over gloo."""

import pytest

from piper.train.verify import compare
from tests.procs.conftest import GetPool
from tests.strategies import strategies, strategy_of
from tests.zoo import ADAMW, CASES, batches_of, program_of, reference_of

MATRIX = [
    pytest.param(size, name, *chosen, id=f"{size}-{name}-{chosen[0]}-{chosen[1]}")
    for size in (2, 4)
    for name, case in CASES.items()
    for chosen in strategies(case, num_ranks=size)
]
pytestmark = pytest.mark.xdist_group("procs")


@pytest.mark.parametrize(("size", "name", "strategy", "schedule"), MATRIX)
def test_trains_like_one_device(
    pool: GetPool, size: int, name: str, strategy: str, schedule: str
) -> None:
    job = program_of(name).apply(strategy_of(strategy, schedule)).lower(optimizer=ADAMW)
    with job.launch(pool(size)) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors
