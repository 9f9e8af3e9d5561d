"""Random strategies: a random model in, directives in a random order that is legal out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any

import msgspec

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.directives.schedule import Schedule
from piper.errors import ScheduleError
from piper.ir.graph import Graph
from piper.ir.nodes import Chunk
from piper.schedules import SCHEDULES, Table, from_rows, schedule, takes_stages_per_rank

from .models import ADAMW, BATCH, Spec, in_groups, program_of

FILE = os.path.abspath("random_strategy.py")  # exists only as the name of the strategies' lines


@dataclass(frozen=True)
class Line:
    """One directive as the user writes it; `after` are the kinds of lines that must come before."""

    code: str
    after: frozenset[str] = frozenset()
    name: str = ""  # of what it makes, for `after` of others

    @property
    def kind(self) -> str:
        return self.code.split("s.", 1)[1].split("(", 1)[0]


def line(code: str, *after: str, name: str = "") -> Line:
    return Line(code, frozenset(after), name)


_PASS = Line("pass")


@dataclass(frozen=True)
class Strategy:
    """A strategy's lines in order, for a model, with what the lines are made of."""

    spec: Spec
    lines: tuple[Line, ...]
    sizes: dict[str, int]  # of the mesh
    place_axes: tuple[str, ...]
    num_stages: int  # 0 without the tag PP
    clip: float | None = None
    late: bool = False
    groups: bool = False  # of parameters
    tables: dict[str, Table] = field(default_factory=dict)
    facts: frozenset[str] = frozenset()

    @property
    def data_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.sizes if axis not in self.place_axes)

    @property
    def source(self) -> str:
        return "def strategy(s):\n" + "".join(
            f"    {line.code}\n" for line in self.lines or [_PASS]
        )

    def lines_of(self, *kinds: str) -> list[int]:
        return [number for number, line in enumerate(self.lines) if line.kind in kinds]

    def source_line(self, index: int) -> int:
        return index + 2

    def with_lines(self, lines: Iterable[Line]) -> Strategy:
        return replace(self, lines=tuple(lines))

    def apply(self) -> Program:
        names: dict[str, Any] = {"where": piper.where, "piper": piper, **self.tables}
        exec(compile(self.source, FILE, "exec"), names)
        strategy: Callable[[Schedule], None] = names["strategy"]
        return program_of(self.spec).apply(strategy)

    def lower(self) -> Job:
        return self.lowered(self.apply())

    def lowered(self, program: Program) -> Job:
        optimizer = in_groups if self.groups else ADAMW
        return program.lower(optimizer=optimizer, clip=self.clip, late_clip=self.late)

    def __repr__(self) -> str:
        end = f"lower(clip={self.clip}, late_clip={self.late}), groups={self.groups}"
        tables = "".join(f"\n{name}: {table}" for name, table in self.tables.items())
        return f"{self.spec}\n{self.source}{end}{tables}"


def random_strategy(rng: Random, specs: Sequence[Spec], rows: Sequence[int] = ()) -> Strategy:
    """A legal strategy for one of the models; `rows` a rank may have in a microbatch (all if empty)."""
    return _Build(rng, rng.choice(specs), rows).strategy()


def with_communication(rng: Random, strategy: Strategy) -> Strategy:
    """The strategy with one more order that names communication: it may not be possible."""
    split = [line.code.split('"')[1] for line in strategy.lines if line.kind == "split"]
    words = []
    for _ in range(rng.randint(2, 3)):
        tags = [f"{tag}={rng.randrange(2)}" for tag in split if rng.random() < 0.7]
        tags += [f"PP={rng.randrange(strategy.num_stages)}"] if strategy.num_stages else []
        kind = rng.choice(("send", "recv", "all_to_all", "reduce_scatter", "all_gather", "*"))
        named = [f"comm={kind!r}", f"comm={kind!r}", "phase='F'", "phase='B'"]
        words.append(f"where({', '.join([*tags, rng.choice(named)])})")
    return strategy.with_lines([*strategy.lines, line(f"s.order([{', '.join(words)}])")])


class _Build:
    """One strategy under construction."""

    def __init__(self, rng: Random, spec: Spec, rows: Sequence[int]) -> None:
        self.rng, self.spec, self.rows = rng, spec, rows
        self.lines: list[Line] = []
        self.facts: set[str] = set()
        self.tables: dict[str, Table] = {}

    def chance(self, percent: int) -> bool:
        return self.rng.random() < percent / 100

    def one_of(self, choices: Sequence[Any]) -> Any:
        return self.rng.choice(list(choices))

    def strategy(self) -> Strategy:
        self._stages()
        self._mesh()
        self._splits()
        self._streams()
        self._place()
        self._experts()
        self._replicate()
        self._recompute()
        made = self._finished(self._shuffled(self.lines))
        if self.kind in ("own", "coarse", "early"):
            before = len(self.lines)
            self._own_order(made)
            made = self._finished(self._shuffled(self.lines))
            if len(self.lines) == before:
                self.kind = "none"
        clip = self.one_of((None, None, 0.05, 0.5))
        late = clip is not None and self.chance(50)
        groups = self.chance(30)
        self.facts |= {f"order {self.kind}", f"pp {self.parts > 1}", f"clip {clip} {late}"}
        self.facts |= {f"groups {groups}"}
        return replace(made, clip=clip, late=late, groups=groups, facts=frozenset(self.facts))

    def _finished(self, lines: Sequence[Line]) -> Strategy:
        return Strategy(
            self.spec, tuple(lines), self.sizes, self.place_axes, self.num_stages,
            tables=self.tables,
        )  # fmt: skip

    def _shuffled(self, lines: Sequence[Line]) -> list[Line]:
        """Any order in which each line comes after what it names."""
        priorities = [self.rng.randrange(10) for _ in lines]
        left = [pair[1] for pair in sorted(zip(priorities, lines, strict=True), key=lambda p: p[0])]
        found: list[Line] = []
        while left:
            waiting = {one.name for one in left}
            ready = next(one for one in left if not one.after & waiting)
            found.append(ready)
            left.remove(ready)
        return found

    # What is there

    def _stages(self) -> None:
        self.num_stages = self.spec.num_stages
        self.cut = not self.spec.tagged and self.chance(70)
        if not self.spec.tagged:
            self.num_stages = self.rng.randint(1, self.num_stages) if self.cut else 0

    def _mesh(self) -> None:
        most = min(4, self.num_stages)
        self.parts = self.rng.randint(1, most) if most else 1  # slices with work
        count = self.one_of((1, 2, 0, 1, 2))
        data = [self.one_of((2, 3, 1, 2)) for _ in range(count)]
        while self.parts * math.prod(data) > 8:
            data.pop()
        names = ["dp", "ep"][: len(data)] if self.chance(70) else ["x", "y"][: len(data)]
        sizes = dict(zip(names, data, strict=True))
        self.place_axes: tuple[str, ...] = ()
        if self.parts == 4 and self.chance(30):
            sizes |= {"pp": 2, "qq": 2}
            self.place_axes = ("pp", "qq")
        elif self.parts > 1 or self.chance(30):
            axis = "pp" if self.chance(80) else "depth"
            sizes |= {axis: self.parts}
            self.place_axes = (axis,)
        order = self.rng.sample(list(sizes), len(sizes))
        self.sizes = {axis: sizes[axis] for axis in order}
        if sizes or self.chance(50):
            shown = ", ".join(f"{axis}={size}" for axis, size in self.sizes.items())
            self.lines.append(line(f"mesh = s.mesh({shown})", name="mesh"))
        self.data = tuple(axis for axis in self.sizes if axis not in self.place_axes)
        if self.cut:
            self.lines.append(line(f's.cut("PP", {self.num_stages})', "mesh", "stream", name="cut"))
        self.base = ("mesh", "cut")

    def _splits(self) -> None:
        """The kind of order, and the splits and the table that it needs."""
        ranks = math.prod(self.sizes[axis] for axis in self.data)
        kinds = ["none", "own", "own", "coarse", "early"]
        options = [m for m in range(1, 9) if BATCH % (ranks * m) == 0]
        liked = [m for m in options if not self.rows or BATCH // (ranks * m) in self.rows]
        microbatches = self.one_of(liked or options)
        fitting = []
        # A stage that runs twice is no stage of a table.
        if self.parts > 1 and len(self.place_axes) == 1 and not self.spec.returns:
            kinds += ["own table"]
            fitting = _tables(self.parts, microbatches, self.num_stages)
            kinds += ["table"] * 4 if fitting else []
        self.kind = self.one_of(kinds)
        self.table: Table | None = None
        directions = 1
        if self.kind == "table":
            self.table = self.one_of(fitting)
            directions = self.table.num_directions
            self.facts.add(f"table {self.table.name}")
        elif self.kind == "own table":
            self.table = self._own_table(microbatches)
        elif microbatches % 2 == 0 and self.chance(25):
            directions = 2
        self.directed = directions > 1
        tag = self.mb = "MB" if self.chance(80) else "PIECE"
        self.split_tags: list[str] = []
        if self.directed:
            self.split_tags.append("DIR")
            self.lines.append(
                line(f's.split(where(), "DIR", {directions})', *self.base, name="DIR")
            )
        if microbatches // directions > 1 or self.table or self.chance(30):
            self.split_tags.append(tag)
            number = microbatches // directions
            # After DIR or before it, as it happens: the microbatches are then others, but as many.
            self.lines.append(line(f's.split(where(), "{tag}", {number})', *self.base, name="MB"))
        if self.table:
            self._order_table(self.table)
            if any(action.kind == "BI" for action in self.table.actions()):
                self.facts.add("halves")

    def _streams(self) -> None:
        self.streams = ["red", "blue"][: self.rng.randint(0, 2)]
        for name in self.streams:
            high = ', priority="high"' if self.chance(30) else ""
            self.lines.append(line(f's.stream("{name}"{high})', name="stream"))

    def _stream(self, argument: str) -> str:
        if self.streams and self.chance(40):
            return f', {argument}="{self.one_of(self.streams)}"'
        return ""

    # Where it runs

    def _own_table(self, microbatches: int) -> Table:
        """A table whose rows agree with a random topological order of all actions."""
        stages = self.rng.randint(self.parts, self.num_stages)
        rank_of = self.rng.sample(range(self.parts), self.parts)
        rank_of = [*rank_of, *self.rng.choices(range(self.parts), k=stages - self.parts)]
        waiting = []
        for microbatch in range(microbatches):
            whole = [self.chance(60) for _ in range(stages)]
            forwards = [(stage, "F", microbatch) for stage in range(stages)]
            backwards = [
                (stage, "B" if whole[stage] else "I", microbatch) for stage in range(stages)
            ]
            waiting.append([*forwards, *reversed(backwards)])
        rows: list[list[str]] = [[] for _ in range(self.parts)]
        while waiting:
            chain = self.rng.choice(waiting)
            stage, kind, microbatch = chain.pop(0)
            rows[rank_of[stage]].append(f"{stage}{kind}{microbatch}")
            if kind == "I":  # its other half comes at any time after it
                chain.insert(self.rng.randint(0, len(chain)), (stage, "W", microbatch))
            waiting = [chain for chain in waiting if chain]
        return from_rows([",".join(row) for row in rows], name="own")

    def _order_table(self, table: Table) -> None:
        regions = list(range(self.num_stages))
        borders = self.rng.sample(regions[1:], table.num_stages - 1)
        edges = [0, *sorted(borders), len(regions)]
        self.groups = [regions[a:b] for a, b in pairwise(edges)]
        more = "" if all(len(group) == 1 for group in self.groups) else f", stages={self.groups}"
        more += "" if self.place_axes == ("pp",) else f', axis="{self.place_axes[0]}"'
        more += "" if self.mb == "MB" else f', microbatch="{self.mb}"'
        self.tables["table"] = table
        self.lines.append(
            line(f"s.order(table{more})", *self.base, "MB", "DIR", "phase", name="order")
        )

    def _place(self) -> None:
        if not self.place_axes:
            return
        ways = [0, 1] if self.directed else [None]
        if self.table is None:
            ways = ways if self.directed and self.chance(60) else [None]
        for way in ways:
            assigned = self._assignment(way)
            for stage, part in enumerate(assigned):
                tags = f"PP={stage}, " if self.num_stages else ""
                tags += f"DIR={way}" if way is not None else ""
                after = ("DIR",) if way is not None else ()
                self._place_stage(stage, tags.removesuffix(", "), part, after, assigned)

    def _place_stage(
        self, stage: int, tags: str, part: int, after: Sequence[str], assigned: Sequence[int]
    ) -> None:
        experts = self.spec.tagged and self.spec.kinds[stage] == "moe"
        if not experts or self.table or not self.chance(40):
            self._place_line(tags, part, after)
            return
        self._place_line(f"{tags}, EP=None", part, after)
        other = self.one_of(assigned) if self.chance(50) else part
        self.facts |= {"experts elsewhere"} if other != part else set()
        self._place_line(f'{tags}, EP="*"', other, after)

    def _place_line(self, tags: str, part: int, after: Sequence[str]) -> None:
        at, rest = [], part
        for axis in reversed(self.place_axes):
            rest, index = divmod(rest, self.sizes[axis])
            at.append(f"{axis}={index}")
        code = f"s.place(where({tags}), mesh.at({', '.join(at)}))"
        self.lines.append(line(code, *self.base, *after))

    def _assignment(self, way: int | None) -> list[int]:
        """The slice of each stage; all slices have work."""
        stages = max(1, self.num_stages)
        if self.table:
            rank_of = self.table.placement()[way or 0]
            return [rank_of[i] for i, members in enumerate(self.groups) for _ in members]
        first = self.rng.sample(range(self.parts), self.parts)
        more = [self.one_of(range(self.parts)) for _ in range(stages - self.parts)]
        assigned = [*first, *more]
        return self.rng.sample(assigned, len(assigned)) if self.chance(50) else assigned

    # Who owns the axes

    def _experts(self) -> None:
        """Which expert regions are split, and over what."""
        self.sharded: tuple[str, ...] = ()
        has = "moe" in self.spec.kinds
        fitting = [
            axes
            for axes in ((axis,) for axis in self.data)
            if self.spec.experts % math.prod(self.sizes[a] for a in axes) == 0
        ]
        if (
            len(self.data) == 2
            and self.spec.experts % math.prod(map(self.sizes.get, self.data)) == 0
        ):
            fitting.append(self.data)
        if not has or not fitting or self.spec.random_experts or not self.chance(85):
            return
        self.sharded = self.one_of(fitting)
        if any(self.sizes[axis] > 1 for axis in self.sharded):
            self.facts.add("EP")
        over = f'"{self.sharded[0]}"' if len(self.sharded) == 1 else repr(self.sharded)
        for selector in self._expert_selectors():
            code = f"s.shard(where({selector}), over={over}{self._stream('stream')})"
            self.lines.append(line(code, *self.base, "stream"))

    def _expert_selectors(self) -> list[str]:
        regions = [i for i, kind in enumerate(self.spec.kinds) if kind == "moe"]
        if self.spec.tagged and self.chance(40):
            return [f'PP={stage}, EP="*"' for stage in regions]
        if self.chance(30):
            return [f"EP={number}" for number in range(len(regions))]
        return ['EP="*"']

    def _replicate(self) -> None:
        if not self.data:
            return
        has = "moe" in self.spec.kinds
        by_experts = bool(self.sharded) or (has and self.chance(40))
        sets: list[set[int] | None] = [None]
        if self.spec.tagged and self.chance(60):
            sets = [set(s) for s in self.spec.alike()]
        for stages in sets:
            dense = self._options(self.data)
            experts = self._options(tuple(a for a in self.data if a not in self.sharded))
            for stage in [None] if stages is None else sorted(stages):
                tag = "" if stage is None else f"PP={stage}"
                local = has if stage is None else self.spec.kinds[stage] == "moe"
                if by_experts and local:
                    comma = ", " if tag else ""
                    self._replicate_lines(f"{tag}{comma}EP=None", dense)
                    self._replicate_lines(f'{tag}{comma}EP="*"', experts)
                else:
                    self._replicate_lines(tag, dense)

    def _options(self, axes: tuple[str, ...]) -> list[tuple[tuple[str, ...], str]]:
        """(axes, options) of each directive that together own `axes`."""
        if not axes:
            return []
        zero = self.rng.randint(0, 3)
        more = f", zero={zero}" if zero else ""
        if self.chance(40):
            uses = self.one_of((1, 2, 3, "'step'"))
            more += f", prefetch={self.one_of((0, 1, 2, 5))}"
            more += f", reuse={uses}" if zero == 3 else ""
        if zero > 1 and self.chance(60):
            more += f", reduce_every={self.one_of((1, 2, 3))}"
        parts = [axes]
        if len(axes) > 1 and self.chance(50):
            parts = [(axis,) for axis in axes]
        found = []
        for part in parts:
            whole = len(parts) > 1 and self.chance(40)
            size = ""
            if self.chance(25):
                size = f", bucket_size={self.one_of((1, 100, 600, repr('1KiB')))}"
            streams = self._stream("reduce_stream") + self._stream("gather_stream")
            found.append((part, ("" if whole else more) + size + streams))
            if not whole and any(self.sizes[axis] > 1 for axis in part):
                self.facts.add(f"zero {zero}")
        return found

    def _replicate_lines(self, tags: str, options: list[tuple[tuple[str, ...], str]]) -> None:
        phases = [", phase='F'", ", phase='B'"] if not tags and self.chance(10) else [""]
        for axes, more in options:
            over = f'"{axes[0]}"' if len(axes) == 1 else repr(axes)
            for phase in phases:
                selector = (tags + phase).removeprefix(", ")
                code = f"s.replicate(where({selector}), over={over}{more})"
                self.lines.append(line(code, *self.base, "stream", name="phase" if phase else ""))

    def _recompute(self) -> None:
        choices = [""]
        if self.num_stages:
            choices += [f"PP={stage}" for stage in range(self.num_stages)]
        if "moe" in self.spec.kinds:
            choices += ['EP="*"', "EP=None"]
        if self.split_tags:
            choices.append(f"{self.split_tags[-1]}=0")
        for selector in self.rng.choices(choices, k=self.rng.randint(0, 2)):
            keep = self.one_of(("nothing", "expensive"))
            self.facts.add(f"recompute {keep}")
            after = ("MB", "DIR") if "=0" in selector else ()
            code = f's.recompute(where({selector}), keep="{keep}")'
            self.lines.append(line(code, *self.base, *after))

    # Orders of their own

    def _own_order(self, made: Strategy) -> None:
        """Orders that a random topological order of regions and phases agrees with."""
        graph = made.apply().graph
        for split in graph.splits if self.kind == "early" else ():
            graph = _without(graph, split.tag)
        tags = [t for t in graph.tag_values if t != "EP"]
        if self.kind == "coarse" and tags:
            tags = [self.one_of(tags)]
        elif "EP" in graph.tag_values and self.chance(40):
            tags = [*tags, "EP"]
        halved = frozenset(self.rng.sample(range(13), self.rng.choice((0, 3, 6))))
        order = _random_order(graph, tags, halved, self.rng)
        if order is None or len(order.keys) < 2:
            return
        count = self.rng.randint(1, 2)
        # Overlap groups of two orders may interleave their members in ways that exclude each other.
        local = self.kind == "own" and count == 1 and "experts elsewhere" not in self.facts
        for _ in range(count):
            groups = self._groups(order, overlap=local)
            if len(groups) > 1:
                after = [*self.base, "phase"]
                after += ["MB", "DIR"] if self.kind != "early" else []
                self.lines.append(line(f"s.order([{', '.join(groups)}])", *after, name="order"))

    def _groups(self, order: _Order, *, overlap: bool) -> list[str]:
        """Keys one after the other, some together if `overlap`: then each lies on one slice."""
        wanted = [self.chance(50) for _ in order.keys]
        if self.chance(50):
            wanted = [True] * len(order.keys)
        chosen = [key for key, on in zip(order.keys, wanted, strict=True) if on]
        groups: list[list[_Key]] = []
        for key in chosen:
            free = overlap and groups and not any(order.related(key, other) for other in groups[-1])
            if free and len(groups[-1]) < 3 and self.chance(20):
                groups[-1].append(key)
                self.facts.add("overlap")
            else:
                groups.append([key])
        if any(key.phase in ("BI", "BW") for key in chosen):
            self.facts.add("halves")
        shown = [[key.code for key in group] for group in groups]
        return [g[0] if len(g) == 1 else f"[{', '.join(g)}]" for g in shown]


@cache
def _tables(ranks: int, microbatches: int, num_stages: int) -> list[Table]:
    """All tables that fit: a stage is one region or several."""
    found = []
    for name in SCHEDULES:
        for per_rank in (1, 2, 3) if takes_stages_per_rank(name) else (None,):
            try:
                table = schedule(
                    name,
                    num_ranks=ranks,
                    num_microbatches=microbatches,
                    stages_per_rank=per_rank,
                )
            except ScheduleError:
                continue
            if table.num_stages <= num_stages:
                found.append(table)
    return found


@dataclass(frozen=True)
class _Key:
    """All chunks with these values of some tags, in one phase."""

    tags: tuple[tuple[str, int | None], ...]
    phase: str

    @property
    def code(self) -> str:
        words = [f"{tag}={value}" for tag, value in self.tags]
        return f"where({', '.join([*words, f'phase={self.phase!r}'])})"


@dataclass
class _Order:
    keys: list[_Key]
    above: dict[_Key, set[_Key]]  # all that a key needs

    def related(self, one: _Key, other: _Key) -> bool:
        return one in self.above[other] or other in self.above[one]


def _without(graph: Graph, tag: str) -> Graph:
    """The nodes of the first microbatch alone, without their tag: what stood before the split."""
    nodes = {
        name: msgspec.structs.replace(node, tags=tuple(p for p in node.tags if p[0] != tag))
        for name, node in graph.nodes.items()
        if node.tag(tag) == 0
    }
    return msgspec.structs.replace(graph, nodes=nodes)


def _random_order(
    graph: Graph, tags: Sequence[str], halved: frozenset[int], rng: Random
) -> _Order | None:
    """A random topological order of keys; None if keys of these tags need each other."""
    key_of: dict[str, _Key] = {}
    for node in graph.chunks:
        key_of[node.name] = _Key(tuple((tag, node.tag(tag)) for tag in tags), node.phase)
    backwards = list(dict.fromkeys(k.tags for k in key_of.values() if k.phase == "B"))
    split = {key for number, key in enumerate(backwards) if number in halved}
    needs: dict[_Key, set[_Key]] = {}
    for name, node in graph.nodes.items():
        assert isinstance(node, Chunk)
        for part in _parts(key_of[name], split):
            found = needs.setdefault(part, set())
            if part.phase == "BW":
                found.add(_Key(part.tags, "BI"))
                continue
            for before in graph.predecessors(node):
                if before in key_of:
                    found.add(_parts(key_of[before], split)[0])
    for key in needs:
        needs[key].discard(key)
    priority = [rng.randrange(10) for _ in needs]
    left = [key for _, key in sorted(zip(priority, needs, strict=True), key=lambda pair: pair[0])]
    done: list[_Key] = []
    above: dict[_Key, set[_Key]] = {}
    while left:
        ready = next((key for key in left if needs[key] <= above.keys()), None)
        if ready is None:
            return None
        above[ready] = needs[ready].union(*(above[key] for key in needs[ready]))
        done.append(ready)
        left.remove(ready)
    return _Order(done, above)


def _parts(key: _Key, split: set[tuple[tuple[str, int | None], ...]]) -> list[_Key]:
    if key.phase == "B" and key.tags in split:
        return [_Key(key.tags, "BI"), _Key(key.tags, "BW")]
    return [key]
