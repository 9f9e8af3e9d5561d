"""Law 1: every strategy trains like one device; float64, several AdamW steps, all ranks in process."""

import pytest

from piper.train.verify import compare
from tests.strategies import strategies, strategy_of
from tests.zoo import ADAMW, CASES, batches_of, program_of, reference_of

MATRIX = [
    pytest.param(
        name, *chosen, id=f"{name}-{chosen[0]}-{chosen[1]}", marks=pytest.mark.xdist_group(name)
    )
    for name, case in CASES.items()
    for chosen in strategies(case)
]


@pytest.mark.parametrize(("name", "strategy", "schedule"), MATRIX)
def test_trains_like_one_device(name: str, strategy: str, schedule: str) -> None:
    job = program_of(name).apply(strategy_of(strategy, schedule)).lower(optimizer=ADAMW)
    reference = reference_of(name, job)
    for adversary in (False, True):
        with job.launch("loopback", adversary=adversary, seed=7) as run:
            errors = compare(run, batches_of(name), reference)
        assert errors.loss <= 1e-10, errors
        assert errors.gradient <= 1e-10, errors
        assert errors.parameter <= 1e-8, errors
        assert errors.differing_replicas == []
