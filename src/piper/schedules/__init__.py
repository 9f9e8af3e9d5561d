"""Pipeline schedules as data: numbers in, a table of actions per rank out."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from piper.errors import ScheduleError, did_you_mean
from piper.schedules.gpipe import gpipe
from piper.schedules.interleaved import interleaved_1f1b
from piper.schedules.one_f_one_b import one_f_one_b
from piper.schedules.table import Action, Table, schedule_call

SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
}


def num_stages_vary(name: str) -> bool:
    """Whether a schedule takes `stages_per_rank`."""
    return name in SCHEDULES and "stages_per_rank" in inspect.signature(SCHEDULES[name]).parameters


def schedule(
    name: str, *, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None
) -> Table:
    """The table of the schedule called `name`; `stages_per_rank` defaults to what it usually has."""
    if name not in SCHEDULES:
        raise ScheduleError(
            f"no schedule is called {name!r}{did_you_mean(name, list(SCHEDULES))}",
            call=schedule_call(name),
            legal=", ".join(SCHEDULES),
        )
    if stages_per_rank is not None and not num_stages_vary(name):
        raise ScheduleError(f"schedule {name} has one stage per rank")
    more = {} if stages_per_rank is None else {"stages_per_rank": stages_per_rank}
    return SCHEDULES[name](num_ranks=num_ranks, num_microbatches=num_microbatches, **more)


__all__ = [
    "SCHEDULES",
    "Action",
    "Table",
    "gpipe",
    "interleaved_1f1b",
    "num_stages_vary",
    "one_f_one_b",
    "schedule",
]
