"""What cuBLAS is told about multiprocessors, with a stand-in for its function."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from piper.runtime.order import device_order, multiprocessors
from piper.runtime.order.multiprocessors import Multiprocessors
from piper.strategies import parallel
from piper.training.profile import base_machine
from tests.zoo import ADAMW, program_of

HANDLE = 7


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(handle, target) of each call; a target of 24 fails."""
    found: list[tuple[int, int]] = []

    def function(handle: int, target: int) -> int:
        found.append((handle, target))
        return 3 if target == 24 else 0

    monkeypatch.setattr(multiprocessors, "_function", lambda: function)
    monkeypatch.setattr(Multiprocessors, "left", 0)
    card = SimpleNamespace(multi_processor_count=32)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: HANDLE)
    return found


def test_only_changes_are_told(told: list[tuple[int, int]]) -> None:
    room, other = (Multiprocessors(torch.device("cuda")) for _ in range(2))
    for one, num in ((room, 0), (room, 4), (room, 4), (other, 4), (other, 0), (room, 0)):
        one.leave(num)
    assert told == [(HANDLE, 28), (HANDLE, 0)]


def test_products_keep_a_half(told: list[tuple[int, int]]) -> None:
    Multiprocessors(torch.device("cuda")).leave(30)
    assert told == [(HANDLE, 16)]


def test_a_refusal_is_told(told: list[tuple[int, int]]) -> None:
    with pytest.raises(RuntimeError, match="cuBLAS gives 3 for a target of 24"):
        Multiprocessors(torch.device("cuda")).leave(8)
    assert Multiprocessors.left == 0


def test_without_the_function_nothing_happens(
    told: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessors, "_function", lambda: None)
    room = Multiprocessors(torch.device("cuda"))
    room.leave(4)
    assert "cublasSetSmCountTarget" in room.problem and not told


def test_only_tasks_with_products_change_it() -> None:
    job = program_of("deep").apply(parallel(dp=2, zero=1)).lower(optimizer=ADAMW)
    kinds = {
        task.kind: device_order._leaves(task) for part in job.plan.classes for task in part.tasks
    }
    assert kinds["run"] == kinds["update"] == 0
    assert kinds["add"] == kinds["reduce_scatter"] == device_order.ANY


def test_a_part_of_a_card_has_its_part_of_everything() -> None:
    whole, part = base_machine("NVIDIA H200"), base_machine("NVIDIA H200", 0.25)
    assert part.flops["bfloat16"] == whole.flops["bfloat16"] / 4
    assert (part.bandwidth, part.sms) == (whole.bandwidth / 4, 33)
    assert part.node == whole.node and part.source.startswith("25% of it; ")
    assert base_machine("NVIDIA L4").source == "figures of an h100"
