"""Stages: a Capture without stage tags in, the positions where balanced stages begin out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from piper.bodies.captured_nodes import numbered, plain_code
from piper.cost.balance import Together, balanced_together, largest_group
from piper.errors import Call, CutError, did_you_mean
from piper.frontend.capture.capture import Capture
from piper.frontend.cut.node_costs import node_costs
from piper.frontend.cut.regions import free_code, is_code, own_tags
from piper.frontend.cut.unit_times import unit_times
from piper.frontend.cut.units import Unit, Units, crossing_bytes, inseparable

_ALIKE = 0.9  # modules of at least this share of the costliest one are opened with it
_ENOUGH = 8  # units per stage, from which on no further module is opened
_WORTH = 1.05  # smaller units must make the largest stage smaller than this


@dataclass(frozen=True)
class StageCut:
    """Nodes of the trace from the number `starts[i]` on have the tag i; the same in eval() mode (see
    `numbered`)."""

    tag: str
    starts: tuple[int, ...]

    def stage_of(self, position: int) -> int:
        return bisect_right(self.starts, position) - 1

    def moved(self, whole: fx.Graph, other: fx.Graph) -> StageCut:
        """The same cut in a trace with other code in places: stages begin at nodes of the same names."""
        names = [node.name for node in plain_code(whole)]
        numbers = {node.name: number for node, number in numbered(other).items()}
        last = len(plain_code(other))
        starts = (
            next((numbers[name] for name in names[start:] if name in numbers), last)
            for start in self.starts[1:]
        )
        return StageCut(self.tag, (0, *starts))


def choose_stages(
    capture: Capture,
    tag: str,
    num: int,
    *,
    costs: Mapping[str, float] | None,
    together: Together | None,
    call: Call,
) -> StageCut:
    """Cut at boundaries of modules so that the costliest stage, or the costliest of those that lie
    together, is as cheap as possible.

    Costs are estimated, or given in seconds by module path; then other code costs nothing. Modules
    are opened as far as that helps, equal ones together.
    """
    numbers = numbered(capture.graph)
    nodes = _cuttable(capture)
    per_node = _estimated(capture, nodes)
    units = Units(nodes)
    if costs is not None:
        per_node = _given(per_node, units, costs, capture, call)
    fixed = inseparable(nodes, capture) | _inside_regions(nodes, capture)
    groups = together or [(stage,) for stage in range(num)]
    for narrow in (crossing_bytes(nodes), None):
        best, count = _best(units, per_node, groups, fixed, narrow)
        if best:
            return StageCut(tag, (0, *(numbers[nodes[start]] for start in best[1:])))
    raise CutError(
        f"the model cannot be cut into {num} stages",
        call=call,
        requirement=2,
        details=[f"it runs through {count} modules that can be cut apart"],
        legal=f"at most {count}",
    )


def measured_costs(capture: Capture, num: int, *, device: str) -> dict[str, float]:
    """Seconds by module path, as `choose_stages` takes them: of modules as small as cuts into `num`
    stages need, measured here."""
    nodes = _cuttable(capture)
    estimated = _estimated(capture, nodes)
    units = Units(nodes)
    leaves = units.leaves()
    per_node = [0.0] * len(nodes)
    times = unit_times(capture, nodes, leaves, estimated, device=device)
    for unit, seconds in zip(leaves, times, strict=True):
        _share_out(seconds, range(unit.start, unit.stop), estimated, per_node)
    fixed = inseparable(nodes, capture) | _inside_regions(nodes, capture)
    *_, (level, _) = _levels(units, per_node, num, fixed, crossing_bytes(nodes))
    costs: dict[str, float] = {}
    for unit in sorted(level, key=lambda unit: unit.path.count(".")):
        outer = [path for path in costs if f"{unit.path}.".startswith(f"{path}.")]
        path = outer[0] if outer else unit.path  # a module that is opened in one of its calls only
        costs[path] = costs.get(path, 0.0) + sum(per_node[unit.start : unit.stop])
    return {path: float(f"{seconds:.3g}") for path, seconds in costs.items() if path}


def _cuttable(capture: Capture) -> list[fx.Node]:
    free = free_code(capture)
    return [node for node in numbered(capture.graph) if is_code(node) and node not in free]


def _estimated(capture: Capture, nodes: Sequence[fx.Node]) -> list[float]:
    estimated = node_costs(capture)
    return [estimated[node] for node in nodes]


def _best(
    units: Units,
    per_node: Sequence[float],
    together: Together,
    fixed: set[int],
    crossing: Sequence[int] | None,
) -> tuple[list[int], int]:
    """Where the best stages begin, if there are so many, and how many there can be."""
    best: list[int] = []
    bound = float("inf")
    count = 1
    num = sum(map(len, together))
    for _, starts in _levels(units, per_node, num, fixed, crossing):
        count = len(starts)
        if count >= num:
            sums = _sums(per_node, starts)
            begins = balanced_together(sums, num, together)
            most = largest_group(sums, begins, together)
            if not best or most * _WORTH < bound:
                best, bound = [starts[i] for i in begins], most
    return best, count


def _levels(
    units: Units,
    per_node: Sequence[float],
    num: int,
    fixed: set[int],
    crossing: Sequence[int] | None,
) -> Iterator[tuple[list[Unit], list[int]]]:
    """Ever finer units, and where stages may start: of the modules that can be opened the costliest are,
    until there are enough.

    No cut inside a module may send more bytes than those around it do: a layer is not cut where its
    hidden activations are wide.
    """
    level = [(units.whole, float("inf"))]  # with the most bytes that a cut inside may send
    while True:
        starts = [0, *(unit.start for unit, _ in level[1:] if unit.start not in fixed)]
        yield [unit for unit, _ in level], starts
        inner = {unit: units.open(unit) for unit, _ in level}
        cost = {unit: sum(per_node[unit.start : unit.stop]) for unit, _ in level if inner[unit]}
        if not cost or len(starts) >= _ENOUGH * num:
            return
        least = _ALIKE * max(cost.values())
        finer: list[tuple[Unit, float]] = []
        for unit, limit in level:
            if cost.get(unit, -1.0) < least:
                finer.append((unit, limit))
                continue
            if crossing is not None and unit.start > 0 and unit.stop < len(per_node):
                limit = min(limit, max(crossing[unit.start], crossing[unit.stop]))
            finer += [(part, limit) for part in inner[unit]]
            if crossing is not None:
                fixed = fixed | {p.start for p in inner[unit][1:] if crossing[p.start] > limit}
        level = finer


def _sums(per_node: Sequence[float], starts: Sequence[int]) -> list[float]:
    ends = [*starts[1:], len(per_node)]
    return [sum(per_node[start:end]) for start, end in zip(starts, ends, strict=True)]


def _inside_regions(nodes: Sequence[fx.Node], capture: Capture) -> set[int]:
    """Positions inside of tagged regions, such as experts: those stay in one stage."""
    spans: dict[tuple[str, int], tuple[int, int]] = {}
    for position, node in enumerate(nodes):
        for pair in own_tags(node, capture.model).items():
            start, _ = spans.get(pair, (position, position))
            spans[pair] = (start, position)
    return {i for start, end in spans.values() for i in range(start + 1, end + 1)}


def _given(
    estimated: Sequence[float],
    units: Units,
    costs: Mapping[str, float],
    capture: Capture,
    call: Call,
) -> list[float]:
    """The user's seconds, shared out over the nodes of each module as their estimates are."""
    members: dict[str, list[int]] = {path: [] for path in costs}
    for position, levels in enumerate(units.levels):
        named = [path for path in levels if path in costs]
        if len(named) > 1:
            raise CutError(
                f"costs name both {named[0]} and {named[1]}, which is inside of it",
                call=call,
                legal="costs of modules that lie beside each other",
            )
        for path in named:
            members[path].append(position)
    found = [0.0] * len(estimated)
    for path, positions in members.items():
        if not positions:
            known = [name for name, _ in capture.model.named_modules() if name]
            raise CutError(
                f"costs name {path!r}, but no code runs in such a module"
                f"{did_you_mean(path, known)}",
                call=call,
                legal="paths of modules, as model.named_modules() has them",
            )
        _share_out(costs[path], positions, estimated, found)
    return found


def _share_out(
    seconds: float, positions: Sequence[int], estimated: Sequence[float], found: list[float]
) -> None:
    total = sum(estimated[i] for i in positions)
    for i in positions:
        found[i] = seconds * (estimated[i] / total if total else 1 / len(positions))
