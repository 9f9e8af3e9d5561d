"""The list of passes: each one leaves a well-formed graph, is timed, and can be looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from piper.cli.main import main
from piper.errors import PlanError
from piper.ir.form.graph_text import graph_from_text
from piper.passes import lower
from piper.strategies import parallel
from tests.matrix import Cell
from tests.zoo import program_of

NAMES = [each.name for each in lower.PASSES]
MOE = Path(__file__).parents[2] / "examples" / "moe.py"


@pytest.mark.xdist_group("tied")
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_pass_leaves_a_well_formed_graph(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = lower.verify

    def verify(graph: object, *, closed: bool = True) -> None:
        seen.append(closed)
        real(graph, closed=closed)  # type: ignore[arg-type]

    monkeypatch.setattr(lower, "VERIFY_EACH", True)
    monkeypatch.setattr(lower, "verify", verify)
    job = Cell(zero, "zb_h1", "sharded", "tied").job()
    assert len(seen) == len(NAMES) + 1, "after each pass, and in the pass of that name"
    assert list(job.seconds) == ["refine", *NAMES, "prove"]


@pytest.mark.xdist_group("tied")
def test_a_pass_that_breaks_the_graph_is_named_by_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def careless(state: lower.Lowering) -> None:
        name = next(iter(state.draft.nodes))
        del state.draft.nodes[name]

    broken = lower.Pass("careless", careless, close=False)
    monkeypatch.setattr(lower, "PASSES", (lower.PASSES[0], broken, *lower.PASSES[1:]))
    monkeypatch.setattr(lower, "VERIFY_EACH", True)
    with pytest.raises(PlanError, match="read but never written"):
        program_of("tied").apply(parallel(pp=2, microbatches=2)).lower()


@pytest.mark.xdist_group("tied")
def test_the_graph_after_a_pass() -> None:
    program = program_of("tied").apply(parallel(pp=2, dp=2, zero=3, microbatches=2))
    before, after = (program.text_after(name) for name in ("transfers", "pace"))
    assert "send" in before and "all_gather" not in before, "gathers for use come with pace"
    assert "all_gather" in after
    assert graph_from_text(after).level == "physical"
    with pytest.raises(PlanError, match=r"no pass is called 'pase' \(did you mean 'pace'"):
        program.text_after("pase")


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(MOE), "--pp", "2", "--dump-after", "bind"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("graph physical") and "chunk F[PP=0" in text and "comm" not in text
    assert main(["plan", str(MOE), "--pp", "2", "--timings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-len(NAMES) - 2 :]] == ["refine", *NAMES, "prove"]
