"""Report data: plans and timelines in; the one block of data that a page shows, out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from piper.check import most_bytes
from piper.errors import FileError
from piper.insight.causes import Causes
from piper.insight.critical_path import critical_path
from piper.no_collections import no_collections
from piper.observe.pictures.styles import MEMORY_COLORS, STYLES
from piper.observe.timeline import Timeline, Track
from piper.plan.local_order import Local
from piper.plan.types import Plan, RankClass, class_of
from piper.view.alive_tensors import MemoryColumns, memory_columns
from piper.view.class_columns import ClassColumns, class_columns
from piper.view.columns import Columns
from piper.view.directive_rows import DirectiveRow, directive_rows
from piper.view.label_columns import LabelColumns, LabelTables
from piper.view.span_columns import WHYS, PathColumns, SpanColumns, StepSpans
from piper.view.step_shares import StepShares, step_shares
from piper.view.strategy_line import strategy_line
from piper.view.task_graph import TaskGraph, task_graph
from piper.view.traffic import Matrix, matrix

VERSION = 1
_FEW = 8  # ranks that a track's name lists


@dataclass(frozen=True)
class Shown:
    """A timeline to be shown, under a name; `step` is which of its steps, the last one by default."""

    name: str
    timeline: Timeline
    step: int = -1


class TrackRows(msgspec.Struct, frozen=True):
    name: str
    ranks: str
    first: int
    num_ranks: int
    labels: int
    part: int  # its class in the plan, or -1
    spans: SpanColumns
    memory: MemoryColumns | None


class TimelineRows(msgspec.Struct, frozen=True):
    """`tick` is in seconds, or in the unit of a schedule's table."""

    name: str
    source: str
    tick: float
    unit: str
    step: int
    steps: list[float]
    clock_error: float
    host_computes: bool
    shares: StepShares | None
    tracks: list[TrackRows]
    directives: list[str]
    path: PathColumns | None


class PlanRows(msgspec.Struct, frozen=True):
    hash: str
    strategy: str
    mesh: str
    num_ranks: int
    num_microbatches: int
    device: str
    precision: str
    peak: int  # as the plan's summary has it: task by task, in the order of dispatch
    classes: list[ClassColumns]
    directives: list[DirectiveRow]
    traffic: Matrix
    graph: TaskGraph


class StyleRow(msgspec.Struct, frozen=True):
    key: str
    meaning: str
    color: str


class Head(msgspec.Struct, frozen=True):
    version: int
    title: str
    whys: tuple[str, ...]
    categories: dict[str, str]  # of memory, with their colours
    styles: list[StyleRow]
    labels: list[LabelColumns]
    plan: PlanRows | None
    timelines: list[TimelineRows]
    strings: list[str]


def report_block(shown: Sequence[Shown], *, plan: Plan | None, title: str = "") -> bytes:
    """All timelines are of the plan, where there is one; the first stands on top."""
    with no_collections():
        return _Report(shown, plan).block(title)


class _Report:
    def __init__(self, shown: Sequence[Shown], plan: Plan | None) -> None:
        self.shown, self.plan = shown, plan
        self.columns = Columns()
        self.columns.string("")
        self.labels = LabelTables(self.columns)
        self.locals = [Local(found.tasks, found.slots) for found in plan.classes] if plan else []

    def block(self, title: str) -> bytes:
        timelines = [self._timeline(each) for each in self.shown]
        plan = self._plan(self.plan) if self.plan else None
        head = Head(
            VERSION,
            title or (plan.strategy if plan else self.shown[0].name),
            WHYS,
            MEMORY_COLORS,
            [StyleRow(key, style.meaning, style.web) for key, style in STYLES.items()],
            self.labels.lists,
            plan,
            timelines,
            self.columns.strings,
        )
        return self.columns.block(head)

    def _plan(self, plan: Plan) -> PlanRows:
        return PlanRows(
            plan.content_hash(),
            strategy_line(plan),
            str(plan.mesh),
            plan.mesh.size,
            plan.num_microbatches,
            plan.device,
            str(plan.precision),
            most_bytes(plan),
            [
                class_columns(self.columns, plan, found, local)
                for found, local in zip(plan.classes, self.locals, strict=True)
            ],
            directive_rows(plan),
            matrix(self.columns, plan),
            task_graph(plan, self.locals),
        )

    def _timeline(self, shown: Shown) -> TimelineRows:
        timeline = shown.timeline
        if not timeline.num_spans or timeline.unit != "s":
            raise FileError(f"{shown.name} has no measured or simulated step", legal="one that has")
        step = shown.step % len(timeline.steps) if timeline.steps else 0
        causes = None
        if self.plan is not None and timeline.plan and timeline.steps:
            causes = Causes(self.plan, timeline, step)
        spans = StepSpans(self.columns, self.labels, timeline, step)
        return TimelineRows(
            shown.name,
            timeline.source,
            spans.clock.tick,
            timeline.unit,
            step,
            timeline.step_seconds,
            timeline.clock_error,
            timeline.host_computes,
            step_shares(timeline, step) if timeline.steps else None,
            [self._track(spans, number, causes) for number in range(len(timeline.tracks))],
            list(timeline.directives),
            spans.path(critical_path(causes)) if causes else None,
        )

    def _track(self, spans: StepSpans, number: int, causes: Causes | None) -> TrackRows:
        track = spans.timeline.tracks[number]
        part, memory = -1, None
        if self.plan is not None and causes is not None:
            found = class_of(self.plan, track.ranks[0])
            part = _place(self.plan, found)
            memory = memory_columns(
                self.columns,
                self.plan,
                self.locals[part],
                track,
                step=spans.step,
                clock=spans.clock,
            )
        return TrackRows(
            track.name,
            ranks_text(track),
            track.ranks[0],
            len(track.ranks),
            self.labels.number(track),
            part,
            spans.of_track(number, causes),
            memory,
        )


def _place(plan: Plan, found: RankClass) -> int:
    return next(number for number, other in enumerate(plan.classes) if other is found)


def ranks_text(track: Track) -> str:
    """`rank 3`, `ranks 0-7`, `ranks 0, 2, 4, ...`."""
    ranks = track.ranks
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    more = ", ..." if len(ranks) > _FEW else ""
    return f"ranks {', '.join(map(str, islice(ranks, _FEW)))}{more}"
