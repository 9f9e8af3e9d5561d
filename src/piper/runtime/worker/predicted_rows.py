"""Predictions: what the ranks made of their rows in, the user's results for the whole batch out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import torch
from torch import Tensor

from piper.plan.types import Plan, bind


def assembled_predictions(plan: Plan, results: Sequence[dict[str, Any]]) -> Any:
    """All rows, in the order of the global batch: by data rank, then by microbatch. Of ranks that have
    the same rows the first one counts."""
    parts: dict[str, dict[tuple[int, int], Tensor]] = defaultdict(dict)
    for rank, result in enumerate(results):
        data_rank = bind(plan, rank).data_rank
        for key, tensor in result.items():
            kind, _, rest = key.partition(".")
            if kind == "prediction":
                number, _, name = rest.partition(".")
                parts[unquote(name)].setdefault((data_rank, int(number)), tensor)
    whole = {
        name: torch.cat([found[place] for place in sorted(found)]) for name, found in parts.items()
    }
    return _as_returned(whole)


def _as_returned(whole: dict[str, Tensor]) -> Any:
    """In the form, and the order, that the user's function gives: names are `=`, `=key.NUMBER.NAME` or
    `=place.NUMBER`."""
    if list(whole) == ["="]:
        return whole["="]
    words = {name: name.split(".", 2) for name in whole}
    ordered = sorted(whole, key=lambda name: int(words[name][1]))
    if words[ordered[0]][0] == "=place":
        return tuple(whole[name] for name in ordered)
    return {words[name][2]: whole[name] for name in ordered}
