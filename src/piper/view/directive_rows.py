"""Directive rows: a plan in; for each directive its code and line, what it did to the logical graph, and
the tasks of the plan that come from it, out."""

from __future__ import annotations

from collections import Counter

import msgspec

from piper.plan.types import Plan
from piper.view.task_graph import without_microbatch


class DirectiveRow(msgspec.Struct, frozen=True):
    """`source` is the user's line, or the call that composed it; `before` and `after` are how many nodes
    the logical graph had, where that is known; `tasks` counts what it made on one rank of each class, by
    kind."""

    code: str
    name: str
    source: str
    effect: str
    added: int
    removed: int
    changed: int
    before: int | None
    after: int | None
    tasks: dict[str, int]
    examples: list[str]
    notes: list[str]


_EXAMPLES = 6


def directive_rows(plan: Plan) -> list[DirectiveRow]:
    made: list[Counter[str]] = [Counter() for _ in plan.history]
    names: list[dict[str, None]] = [{} for _ in plan.history]
    for found in plan.classes:
        for task in found.tasks:
            if 0 <= task.origin < len(made):
                made[task.origin][task.kind] += 1
                if task.kind != "run":  # chunks are of the model
                    names[task.origin][without_microbatch(task.name)] = None
    rows = []
    for number, record in enumerate(plan.history):
        effect = record.effect
        after = record.nodes or None
        rows.append(
            DirectiveRow(
                str(record),
                record.directive.kind,
                record.asked_by,
                str(effect),
                effect.added,
                effect.removed,
                effect.changed,
                after - effect.added + effect.removed if after else None,
                after,
                dict(made[number].most_common()),
                list(names[number])[:_EXAMPLES],
                [str(each) for each in plan.cadences if each.origin == number],
            )
        )
    return rows
