"""Law 5 on processes: what ranks hold, measured on live storages, is what the plan says."""

import pytest

from piper.strategies import parallel
from tests.procs.conftest import GetPool
from tests.zoo import ADAMW, CASES, program_of

pytestmark = pytest.mark.xdist_group("procs")


@pytest.mark.parametrize("precision", [None, "bf16", "bf16-wire", "bf16-pure"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_state_is_what_the_plan_says(pool: GetPool, zero: int, precision: str | None) -> None:
    strategy = parallel(pp=2, dp=2, ep=2, zero=zero, schedule="1f1b", microbatches=4)
    job = program_of("moe").apply(strategy).lower(optimizer=ADAMW, precision=precision)
    with job.launch(pool(4)) as run:
        run.step(CASES["moe"].batch(0))
        measured = run.memory()
    by_class = {peak.label: peak.kept for peak in job.report.peaks}
    assert len(by_class) == 2
    for rank, found in enumerate(measured):
        kept = by_class[f"pp={rank // 2}"]
        for what in ("parameters", "gradients", "optimizer"):
            assert found[what] == pytest.approx(kept[what], rel=0.02), (rank, what)
            assert kept[what] > 0
