"""Products in strips, as plans: which code is joined, and that one strip travels beside another."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

import piper
from piper.errors import MeshError, TensorError
from piper.plan.tasks import Run
from piper.strategies import parallel
from tests import tensor_zoo

pytestmark = pytest.mark.xdist_group("tensor")


def _lowered(**degrees: Any) -> piper.Job:
    return tensor_zoo.program_of("dense").apply(parallel(tp=2, **degrees)).lower()


def test_strips_say_nothing_about_no_ranks() -> None:
    with pytest.raises(MeshError, match="strips=2, but no ranks share tensors"):
        parallel(strips=2)


@pytest.mark.parametrize("strips", [0, "2", True, 1.5])
def test_strips_are_counted(strips: Any) -> None:
    with pytest.raises(TensorError, match=r"requirement 9") as caught:
        _lowered(strips=strips)
    assert f"strips={strips!r}" in str(caught.value)


def test_chunks_agree_on_strips() -> None:
    def strategy(s: piper.Schedule) -> None:
        mesh = s.mesh(tp=2)
        s.place(piper.where(), mesh.at())
        s.shard_tensor(piper.where(PP=0), over="tp", strips=2)
        s.shard_tensor(piper.where(PP=1), over="tp")

    with pytest.raises(TensorError, match=r"strips=2 and 1 along tp.*requirement 9"):
        tensor_zoo.program_of("dense").apply(strategy).lower()


def test_what_does_not_divide_stays_whole_and_is_said() -> None:
    job = _lowered(sp=True, strips=3)
    assert any("8 tokens do not divide into 3 strips over 2 ranks" in n for n in job.plan.gathered)
    assert len(_forwards(job)) == len(_forwards(_lowered(sp=True)))


def _forwards(job: piper.Job) -> list[Run]:
    (part,) = job.plan.classes
    return [task for task in part.tasks if isinstance(task, Run) and task.phase == "F"]


def test_equal_strips_share_bodies() -> None:
    one, two, four = (
        len({t.body for t in _forwards(_lowered(sp=True, strips=n))}) for n in (1, 2, 4)
    )
    assert one < two
    assert (
        four <= two + 2
    )  # a strip between two others sums none of the first, gathers none of the last


@pytest.mark.timeout(300)
def test_a_large_layer_is_predicted_to_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16,384 tokens, cut over the 8 ranks of a node."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    strips, llama = (importlib.import_module(name) for name in ("strips", "llama"))
    for name in ("LAYERS", "VOCABULARY", "WIDTH", "HIDDEN", "HEADS"):
        monkeypatch.setattr(llama, name, getattr(llama, name))
    strips.widen()
    monkeypatch.setattr(llama, "LAYERS", 1)
    program = strips.traced(4)
    whole, halves = (strips.lowered(program, n) for n in (1, 2))
    assert strips.period(halves, strips.H100) < 0.98 * strips.period(whole, strips.H100)
