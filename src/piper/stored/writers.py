"""Writers: a plan in; per rank, which of the elements that it holds it writes, out: each once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import chain, combinations, pairwise
from typing import Literal
from urllib.parse import unquote

import msgspec

from piper.errors import PlanError
from piper.plan.holdings import Holding, holdings
from piper.plan.tensor_parts import Part, all_of
from piper.plan.types import Plan

Section = Literal["model", "ema", "optimizer"]


class Entry(msgspec.Struct, frozen=True):
    """Elements `first` to `last` of a part of a tensor; or all of what has a shape of its own.

    `holding` is its number among the rank's, or negative for a tensor that no rank holds.
    """

    section: Section
    tensor: str  # as the plan calls it
    state: str
    holding: int
    part: Part
    first: int
    last: int
    whole: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        """Where it lies in a nested state_dict."""
        return (self.section, unquote(self.tensor), *([self.state] if self.state else []))

    @property
    def name(self) -> str:
        return ".".join(self.path)


def is_held_by(plan: Plan, ranks: Collection[int]) -> bool:
    """Whether these ranks together hold all that all ranks hold."""
    return bool(ranks) and _sizes(entries_by_rank(plan, ranks)) == _sizes(entries_by_rank(plan))


def _sizes(entries: Iterable[Iterable[Entry]]) -> dict[str, int]:
    """Elements of each tensor; those that have a shape of their own count as one."""
    found: dict[str, int] = defaultdict(int)
    for entry in chain.from_iterable(entries):
        found[entry.name] += 1 if entry.whole else entry.last - entry.first
    return found


def entries_by_rank(plan: Plan, ranks: Collection[int] | None = None) -> list[list[Entry]]:
    """What each rank writes. Of ranks that hold the same elements, the one that writes least so far.
    With `ranks` these alone write, as far as they can."""
    able = range(plan.mesh.size) if ranks is None else sorted(ranks)
    trained = {name for bucket in plan.buckets if bucket.trained for name in bucket.params}
    holders: dict[tuple[Section, str, str], list[tuple[int, int, Holding]]] = defaultdict(list)
    held_names: set[str] = set()
    for rank in able:
        for number, held in enumerate(holdings(plan, rank)):
            held_names.add(held.tensor)
            section = _section(held, trained)
            if section is not None:
                holders[section, held.tensor, held.state].append((rank, number, held))
    found: list[list[Entry]] = [[] for _ in range(plan.mesh.size)]
    load = [0] * plan.mesh.size
    for (section, tensor, state), parts in holders.items():
        for rank, number, held, first, last in _divided(tensor, parts, load):
            alone = held.form != "elements"
            found[rank].append(
                Entry(section, tensor, state, number, held.part, first, last, whole=alone)
            )
            load[rank] += 1 if alone else last - first
    for turn, name in enumerate(sorted(set(plan.tensors) - held_names)):
        part = all_of(plan.tensors[name].shape)
        found[able[turn % len(able)]].append(
            Entry("model", name, "", -1, part, 0, part.num_elements, whole=True)
        )
    return found


def _section(held: Holding, trained: set[str]) -> Section | None:
    """Of trained parameters the masters are kept: parameters are those in a narrower dtype."""
    if held.what == "state":
        return "optimizer"
    if held.what == "average":
        return "ema"
    if held.what == "master" or held.what == "buffer":
        return "model"
    return "model" if held.what == "param" and held.tensor not in trained else None


def _divided(
    tensor: str, parts: list[tuple[int, int, Holding]], load: list[int]
) -> Iterable[tuple[int, int, Holding, int, int]]:
    """Ranges that do not overlap and together are all that ranks hold of a tensor."""
    if parts[0][2].form != "elements" or not parts[0][2].part.num_elements:
        rank, number, held = min(parts, key=lambda part: load[part[0]])
        yield rank, number, held, 0, 0
        return
    alike: dict[Part, list[tuple[int, int, Holding]]] = defaultdict(list)
    for one in parts:
        alike[one[2].part].append(one)
    for part, other in combinations(alike, 2):
        if part.meets(other):
            raise PlanError(f"ranks hold parts of {tensor} that overlap: {part} and {other}")
    for mine in alike.values():
        ends = sorted({end for _, _, held in mine for end in (held.first, held.last)})
        for first, last in pairwise(ends):
            able = [p for p in mine if p[2].first <= first and last <= p[2].last]
            if able:
                rank, number, held = min(able, key=lambda part: load[part[0]])
                yield rank, number, held, first, last
