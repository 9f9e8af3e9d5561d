"""Models as people have them, unmodified, train like one device; PIPER_LONG=1 tries all of them.

docs/models.md has the whole table.
"""

from __future__ import annotations

import os
from itertools import product

import pytest

from tests.model_trial import OF_EXPERTS, STRATEGIES, try_model
from tests.zoo_more import MIXTURES, MODELS

pytest.importorskip("transformers")

LONG = "PIPER_LONG" in os.environ
# A norm with state, recurrence, an encoder with a decoder; experts are in test_hf_experts.py.
SLICE = (
    ("resnet", "pp 2, dp 2, ZeRO-3, zbv"),
    ("lstm", "pp 2, 1F1B"),
    ("swin", "dp 2"),
    ("qwen2", "pp 2, recompute"),
)
ALL = [*product(MODELS, STRATEGIES), *product(MIXTURES, OF_EXPERTS)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "strategy"), ALL if LONG else SLICE)
def test_trains_like_one_device(name: str, strategy: str) -> None:
    trial = try_model(name, MODELS[name](), [strategy])
    assert not trial.failed, trial
    assert not trial.refused, trial
    assert trial.exact.keys() == {strategy}
