"""Options of lower: values that mean nothing are refused by their name."""

from __future__ import annotations

from typing import Any

import pytest

import piper
from tests.loopback.programs import mean_square, random_batch, two


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": piper.adamw(momentum=0.9)}, "AdamW does not take"),
        ({"optimizer": piper.sgd(lr=-1.0)}, "SGD does not take"),
        ({"clip": "1.0"}, "clip='1.0'"),
        ({"clip": True}, "clip=True"),
        ({"clip": 1.0, "late_clip": "no"}, "late_clip='no'"),
        ({"late_clip": True}, "late_clip without clip"),
        ({"memory_limit": "1KiB"}, "the limit is 1.0 KiB"),
    ],
)
def test_options_of_lower_are_checked(options: dict[str, Any], words: str) -> None:
    make = two(lambda self, x: self.run_stages(lambda: self.a(x), self.b))
    program = piper.trace(make, random_batch(0).float(), mean_square)
    with pytest.raises(piper.PiperError, match=words):
        program.lower(**options)
