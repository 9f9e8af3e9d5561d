"""The study of scale: a small case as it runs, and what its committed files and page say."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

HOME = Path(__file__).parents[2]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(HOME / "benchmarks"))
    return importlib.import_module("scale_study")


@pytest.fixture
def pages(study: Any) -> Any:
    return importlib.import_module("scale_page")


def check(case: dict[str, Any], peak: float) -> None:
    """What no prediction can be beyond."""
    assert case["flops"] == pytest.approx(case["flops_by_hand"], rel=1e-6)
    assert 0 < case["mfu"] < 1
    assert case["seconds"] * case["gpus"] * peak >= case["flops"]
    assert case["mfu"] < case["computing"] <= 1, "products are computed, below the device's peak"
    assert case["exposed"] >= 0 and case["bubble"] >= -1e-9
    assert case["computing"] + case["exposed"] + case["bubble"] == pytest.approx(1)
    assert case["exchange_hidden"] is None or 0 <= case["exchange_hidden"] <= 1
    assert 0 < case["bytes_by_category"]["parameters"] < case["bytes"]


def test_a_small_case_is_lowered_and_simulated(study: Any) -> None:
    shape = importlib.import_module("scale_models").qwen3(layers=2, width=256, experts=8, length=64)
    program = study.traced(shape, 32)

    def measured(name: str, gpus: int, **degrees: Any) -> dict[str, Any]:
        case = study.Case("qwen3", gpus, 32, name, {"pp": 2, "ep": 4, **degrees})
        found: dict[str, Any] = study.measure(case, program, shape)
        return found

    found = measured("1F1B", 16, schedule="1f1b")
    assert found["strategy"]["dp"] == 8 and found["strategy"]["microbatches"] == 4
    assert found["mesh"] == "pp=2 dp=2 ep=4" and found["nodes"] > 0
    check(found, study.PEAK)
    assert found["exchange_s"] > 0
    assert 0 < found["direct_seconds"] < found["seconds"], "a ring of 4 has 3 latencies, not one"
    kept = measured("1F1B, rows kept", 16, schedule="1f1b", recompute="pieces")
    saved = [each["bytes_by_category"]["saved"] for each in (found, kept)]
    assert saved[0] < saved[1] / 2, "layers run again with the exchange of their rows"
    assert found["exchange_s"] > 1.2 * kept["exchange_s"]
    refused = measured("DualPipeV", 32, schedule="dualpipev")
    assert "2 microbatches do not fill 2 ranks" in refused["refused"]


def test_what_is_committed_keeps_to_arithmetic(study: Any, pages: Any) -> None:
    found = pages.results()
    known = {case.model + case.key for case in study.CASES}
    count = 0
    for model, each in found.items():
        for key, case in each["cases"].items():
            assert model + key in known, "a case that nobody asks for any more"
            assert "refused" in case or check(case, study.PEAK) is None
            count += 1
    assert count >= 30 and {"qwen3", "deepseek"} == set(found)


def test_the_page_and_its_pictures_are_those_of_the_files(pages: Any) -> None:
    found = pages.results()
    again = "out of date: python benchmarks/scale_study.py --page"
    assert (HOME / "docs" / "scale.md").read_text() == pages.page(found), again
    for name, svg in pages.pictures(found).items():
        assert (HOME / "docs" / "pictures" / name).read_text() == svg, again


def test_what_the_page_says_without_a_figure_follows_from_the_files(pages: Any) -> None:
    found = pages.results()

    def fitting(model: str, gpus: int) -> set[str]:
        return {case["name"] for case in pages.by_speed(found, model, gpus, fitting=True)}

    for model in found:
        for gpus in (256, 2048):
            assert not {"ZBV", "DualPipeV"} & fitting(model, gpus), (
                "filled pipelines are out of reach"
            )
        for gpus in (4096, 16384):
            out_of_reach = (model, gpus) == ("deepseek", 4096)
            assert ("ZBV" in fitting(model, gpus)) is not out_of_reach
            assert "refused" in found[model]["cases"][f"{gpus} GPUs, DualPipeV"]
    assert not fitting("deepseek", 256)
    for taken in ("seconds", "direct_seconds"):
        zbv, cut = (found["qwen3"]["cases"][f"16384 GPUs, ZBV{cut}"] for cut in ("", ", TP4, EP2"))
        assert cut[taken] < zbv[taken], "cutting tensors is shorter under both assumptions"


def test_a_rank_that_needs_more_than_its_card_stands_out(pages: Any) -> None:
    case = {
        "name": "ZBV", "strategy": {"microbatches": 2}, "seconds": 2.0, "tokens": 8000, "gpus": 4,
        "mfu": 0.5, "computing": 0.6, "exposed": 0.3, "bubble": 0.1, "exchange_hidden": 0.25,
        "bytes": 81e9, "lower_s": 3.0, "simulate_s": 1.0, "direct_seconds": 1.5,
    }  # fmt: skip
    row = "| ZBV | 2 | 2.00 s | 1.50 s | 1,000 | 50.0% | 60% | 30% | 10% | 25% | **81 GB** | 4 s |"
    assert pages.row(case) == row
    assert "| 79 GB |" in pages.row({**case, "bytes": 79e9})
    refused = {**case, "refused": "ScheduleError schedule x (a/b.py:3): no\n  legal: y"}
    assert "| refused: ScheduleError schedule x: no |" in pages.row(refused)
