"""Costs: how long each kind of action takes, and a transfer between ranks."""

from __future__ import annotations

from numbers import Real

import msgspec

from piper.errors import ScheduleError
from piper.schedules.table import Action, Cell

Cost = float | tuple[float, ...]
_NAMES = {"F": "F", "BI": "BI", "BW": "BW", "B": "B", "F&B": "FB", "FB": "FB", "comm": "comm"}


class Costs(msgspec.Struct, frozen=True):
    """Times of one stage: a number for all stages, or one number per stage.

    A full backward takes `BI + BW` unless `B` says otherwise; an overlapped pair takes `F + B`
    unless `FB` says otherwise; `comm` is added wherever a result goes to another rank.
    """

    F: Cost = 1.0
    BI: Cost = 1.0
    BW: Cost = 1.0
    B: Cost | None = None
    FB: float | None = None
    comm: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None and name in ("B", "FB"):
                continue
            per_stage = isinstance(value, list | tuple) and name not in ("FB", "comm")
            times = tuple(map(_time, value if per_stage else [value]))
            if not times or None in times:
                one = "a number, or one per stage," if name not in ("FB", "comm") else "a number"
                raise ScheduleError(
                    f"cost {name}={value} is no time", legal=f"{one} of 0 or from 1e-99 to 1e99"
                )
            msgspec.structs.force_setattr(self, name, times if per_stage else times[0])

    def check_stages(self, num_stages: int) -> None:
        """Raise unless there is one cost for all stages, or one for each."""
        for name in ("F", "BI", "BW", "B"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ScheduleError(
                    f"cost {name} has {len(value)} numbers, but there are {num_stages} stages",
                    legal=f"one number, or {num_stages}",
                )

    def of(self, action: Action) -> float:
        if action.kind == "B" and self.B is None:
            return _at(self.BI, action.stage) + _at(self.BW, action.stage)
        return _at(getattr(self, action.kind), action.stage)

    def of_cell(self, cell: Cell) -> float:
        kinds = sorted(action.kind for action in cell.actions)
        if cell.joined == "OVERLAP_F_B" and self.FB is not None and kinds == ["B", "F"]:
            return self.FB
        return sum(self.of(action) for action in cell.actions)

    def __str__(self) -> str:
        shown = []
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None:
                numbers = value if isinstance(value, tuple) else (value,)
                label = "F&B" if name == "FB" else name
                shown.append(f"{label}={':'.join(f'{n:g}' for n in numbers)}")
        return ",".join(shown)


def _at(cost: Cost, stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost


def _time(number: object) -> float | None:
    """A number of any library as a float, if it can be a time."""
    if isinstance(number, bool) or not isinstance(number, Real):
        return None
    try:
        time = float(number)
    except OverflowError:
        return None
    return time if time == 0 or 1e-99 <= time <= 1e99 else None


def parse_costs(text: str) -> Costs:
    """Costs written as `F=1,BI=1,BW=1,comm=0.1`; `F=1:1.2` gives each stage its own."""
    legal = "F=..,BI=..,BW=..,B=..,F&B=..,comm=.. with times, or F=1:1.2 for a time per stage"
    given: dict[str, Cost] = {}
    for item in text.split(","):
        name, equals, value = item.partition("=")
        key = _NAMES.get(name.strip())
        try:
            numbers = tuple(float(number) for number in value.split(":"))
        except ValueError:
            numbers = ()
        if not equals or not numbers or key is None:
            raise ScheduleError(f"cost {item!r} is not understood", legal=legal)
        if key in given:
            raise ScheduleError(f"cost {name.strip()} is given twice", legal=legal)
        if len(numbers) > 1 and key in ("FB", "comm"):
            raise ScheduleError(f"cost {name.strip()} is one number for all stages", legal=legal)
        given[key] = numbers[0] if len(numbers) == 1 else numbers
    return Costs(**given)  # type: ignore[arg-type]
