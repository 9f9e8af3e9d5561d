"""Law 1 on NCCL: ranks that share one GPU train like one device."""

import pytest
import torch

from piper.training.verify import compare
from tests.gpu.conftest import GetPool
from tests.matrix import EXPERTS, MODEL, SCHEDULE, ZERO, Cell
from tests.zoo import batches_of, reference_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.xdist_group("gpu"),
]


def _cell(number: int) -> Cell:
    """Every axis turns at its own pace, so that a few cases have all values."""
    model = MODEL[number % len(MODEL)]
    experts = EXPERTS[(number // len(ZERO) + number) % 2] if model != "dense" else "copied"
    schedule = SCHEDULE[1 + number % (len(SCHEDULE) - 1)]
    return Cell(number % len(ZERO), schedule, experts, model, dp=2)


CELLS = [_cell(number) for number in range(28)]
LONG = [
    Cell(0, "1f1b", "copied", "tied", pp=4, dp=1),
    Cell(0, "zb_h1", "copied", "moe", pp=4, dp=1),
]


@pytest.mark.parametrize("cell", [*CELLS, *LONG], ids=lambda cell: cell.name)
def test_trains_like_one_device(pool: GetPool, cell: Cell) -> None:
    job = cell.job("cuda")
    with job.launch(pool(4)) as run:
        errors = compare(run, batches_of(cell.program), reference_of(cell.program, job))
    assert errors.exact, errors
