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


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    """As many rounds as have one microbatch per rank at least; with fewer microbatches, one."""
    return max(1, num_microbatches // num_ranks)


def microbatches_per_round(name: str, num_ranks: int, num_microbatches: int) -> int:
    """How many microbatches go through a stage before the next one; raise unless rounds are equal."""
    rounds = num_rounds(num_ranks, num_microbatches)
    rest = num_microbatches % rounds
    if rest:
        below = num_microbatches - rest
        above = min(below + rounds, (rounds + 1) * num_ranks)  # of as many rounds, or of one more
        refuse(
            name,
            f"{num_microbatches} microbatches on {num_ranks} ranks do not make {rounds} equal rounds",
            legal=f"a multiple of {num_ranks}, or next to {num_microbatches}: "
            f"{below} or {above} microbatches",
        )
    return num_microbatches // rounds
