"""Matching: stored tensors and a model's names in; what its tensors start from, or one error, out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from piper.errors import WeightsError
from piper.ir.tensor_type import TensorType
from piper.stored.stored_pieces import Stored, StoredTensor

_SHOWN = 4  # names of a list


@dataclass
class Matched:
    """By the model's own names; what the weights lack, and names of theirs that the model has not."""

    model: Stored = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    surplus: list[str] = field(default_factory=list)
    doubled: dict[str, str] = field(default_factory=dict)  # tied names, each stored by itself

    def left(self) -> list[str]:
        """What did not come from the weights."""
        parts = []
        if self.missing:
            parts.append(f"initial values for {_few(self.missing)}")
        if self.surplus:
            parts.append(f"no use for {_few(self.surplus)}")
        return parts


def match(
    stored: Stored,
    names: Mapping[str, str],
    tensors: Mapping[str, TensorType],
    *,
    strict: bool,
    unneeded: Sequence[re.Pattern[str]] = (),
) -> Matched:
    """`names` are those of the state_dict, each with its tensor: several for one that is tied, of which
    one has to be stored. Other tensors of the model, which checkpoints have, may be."""
    taken = set(names.values())
    others = {unquote(tensor): tensor for tensor in tensors if tensor not in taken}
    known = {**{n: t for n, t in others.items() if not _fits(n, unneeded)}, **names}
    found, bad = Matched(), []
    last: dict[str, str] = {}
    for name, tensor in known.items():
        if name in stored:
            problem = _problem(stored[name], tensors[tensor])
            if problem:
                bad.append(f"{name} {problem}")
            found.model[unquote(tensor)] = stored[name]  # as load_state_dict: the last one counts
            if tensor in last and stored[last[tensor]] != stored[name]:
                found.doubled[last[tensor]] = name
            last[tensor] = name
    found.missing = sorted(n for n, tensor in names.items() if unquote(tensor) not in found.model)
    surplus = sorted(stored.keys() - known.keys())
    found.surplus = [name for name in surplus if not _fits(name, unneeded)]
    if bad or (strict and (found.missing or found.surplus)):
        raise _error(found, sorted(bad), strict=strict, some=bool(found.model))
    return found


def _fits(name: str, patterns: Sequence[re.Pattern[str]]) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _problem(stored: StoredTensor, wanted: TensorType) -> str:
    if stored.shape != wanted.shape:
        return f"is {list(stored.shape)}, the model has {list(wanted.shape)}"
    if _kind(stored.dtype) != _kind(wanted.dtype):
        return f"is {stored.dtype}, the model has {wanted.dtype}"
    return ""


def _kind(dtype: str) -> str:
    """What numbers a dtype has: one kind is not taken for another."""
    return next((kind for kind in ("float", "complex", "bool") if kind in dtype), "integer")


def _error(found: Matched, bad: list[str], *, strict: bool, some: bool) -> WeightsError:
    lists = {"missing": found.missing, "surplus": found.surplus, "misshapen": bad}
    if not strict:
        lists = {"misshapen": bad}
    details = [
        f"{what:<9} {_few(names, '; ' if names is bad else ', ')}"
        for what, names in lists.items()
        if names
    ]
    legal = "weights of this model"
    if strict and some and not bad:
        legal += ", or strict=False: initial values for what is missing, no use for what is surplus"
    prefix = _common_prefix(found.surplus, found.missing)
    if prefix:
        legal = f"names without {prefix!r}"
    return WeightsError("the weights do not fit the model", details=details, legal=legal)


def _common_prefix(surplus: Sequence[str], missing: Iterable[str]) -> str:
    """What stands before the model's names in all that is surplus, if that is all."""
    first = next(iter(surplus), "")
    for name in missing:
        if first.endswith(name):
            prefix = first[: len(first) - len(name)]
            if prefix and {f"{prefix}{other}" for other in missing} <= set(surplus):
                return prefix
    return ""


def _few(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)}: {between.join(names[:_SHOWN])}{more}"
