"""Group runs: a bucket, or a window of it, in; its runs of parameters of one parameter group out."""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from piper.plan.types import Bucket


class GroupRun(NamedTuple):
    """Elements `begin` to `end`, with what pads them, are stepped by one parameter group."""

    group: int
    begin: int
    end: int


def group_runs(bucket: Bucket) -> list[GroupRun]:
    """All of a bucket; a run ends where the next one begins."""
    places = range(len(bucket.params))
    firsts = [(group, next(run)) for group, run in groupby(places, bucket.group_of)]
    begins = [0, *(bucket.offsets[first] for _, first in firsts[1:])]
    ends = [*begins[1:], bucket.size]
    groups = [group for group, _ in firsts]
    return [GroupRun(*run) for run in zip(groups, begins, ends, strict=True)]


def runs_within(bucket: Bucket, begin: int, end: int) -> list[GroupRun]:
    """The runs of a window of the bucket, counted from the window's begin."""
    cut = [(g, max(a, begin) - begin, min(b, end) - begin) for g, a, b in group_runs(bucket)]
    return [GroupRun(*run) for run in cut if run[1] < run[2]]
