"""What a generator is asked for, and the error when there is no such table."""

from __future__ import annotations

from typing import NoReturn

from piper.errors import Call, ScheduleError, user_source


def schedule_call(name: str) -> Call:
    """Who asked for a schedule, for errors."""
    return Call(f"schedule {name}", user_source())


def refuse(name: str, message: str, *, legal: str) -> NoReturn:
    raise ScheduleError(message, call=schedule_call(name), legal=legal)


def check_sizes(name: str, **sizes: int) -> None:
    """Raise unless every size is a whole number of at least 1."""
    for what, size in sizes.items():
        if type(size) is not int or size < 1:
            refuse(name, f"{what} is {size!r}", legal=f"{what}: a whole number (int) of at least 1")


def check_rounds(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise unless the microbatches make whole rounds of one per rank."""
    if num_microbatches % num_ranks:
        up = -(-num_microbatches // num_ranks) * num_ranks
        refuse(
            name,
            f"{num_microbatches} microbatches do not make whole rounds of {num_ranks} ranks",
            legal=f"a multiple of {num_ranks}: {up} microbatches",
        )
