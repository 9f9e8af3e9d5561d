"""Code that is cut over ranks names no device of its own: pieces run where their bodies do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piper.bodies.chunk_code import ChunkCode
from piper.bodies.cutting.joint import fake_inputs, runner
from piper.bodies.store import BodyStore, ChunkBodies
from piper.strategies import parallel
from tests.tensor_zoo import program_of

ROWS: list[tuple[str, dict[str, Any]]] = [
    ("dense", {"tp": 4}),
    ("dropout", {"tp": 2, "sp": True, "dp": 2}),
    ("experts", {"tp": 2, "dp": 2, "ep": 2}),
    ("counted", {"cp": 2, "tp": 2}),
    ("dense", {"cp": 2, "cp_attention": "ring"}),
    ("dense", {"cp": 2, "cp_attention": "heads"}),
    ("mixture", {"tp": 2, "sp": True, "etp": 1, "dp": 2, "ep": 4}),
]


@pytest.mark.parametrize(("name", "degrees"), ROWS, ids=str)
def test_pieces_run_on_another_device(
    monkeypatch: pytest.MonkeyPatch, name: str, degrees: dict[str, Any]
) -> None:
    """Forward, on fake CUDA tensors: autograd of such needs a real device."""
    codes: dict[Any, ChunkCode] = {}
    make = BodyStore.chunk

    def noted(self: BodyStore, code: ChunkCode, **options: Any) -> ChunkBodies:
        codes[code.key, code.targets] = code
        return make(self, code, **options)

    monkeypatch.setattr(BodyStore, "chunk", noted)
    program_of(name).apply(parallel(**degrees)).lower()
    assert codes
    for code in codes.values():
        inputs, mode = fake_inputs(code, "cuda")
        with mode, torch.no_grad():
            results = runner(code, device="cuda")(*inputs)
        assert {result.device.type for result in results} == {"cuda"}
