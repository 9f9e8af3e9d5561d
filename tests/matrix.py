"""The parity matrix: ZeRO levels x schedules x experts x models, and what is left out and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, TypeVar
from zlib import crc32

from piper.api.job import Job
from piper.directives.schedule import Schedule
from piper.schedules import SCHEDULES
from piper.strategies import parallel
from piper.training.verify import Errors, compare

from .zoo import ADAMW, PIECES, batches_of, program_of, reference_of

C = TypeVar("C")

# The axes. Every model has four stages: schedules of two take two regions for each.
ZERO = (0, 1, 2, 3)
SCHEDULE = ("none", *SCHEDULES)
EXPERTS = ("copied", "sharded")
MODEL = ("dense", "moe", "tied", "skips", "branches", "dropout", "recompute")
AXES: dict[str, tuple[Any, ...]] = {
    "zero": ZERO, "schedule": SCHEDULE, "experts": EXPERTS, "model": MODEL
}  # fmt: skip

# How often gradients that are kept in parts are reduced: in turns, each with every schedule and model.
REDUCE_EVERY = ("step", 1, 2, 3)

# Per rank of the pipeline, the microbatches that a data rank must have; others need two in all.
_LEAST = {"dualpipe": 2, "dualpipev": 2}
_PROGRAM = {"tied": "deep"}
_BUCKET = 300  # bytes: most modules get a bucket of their own


@dataclass(frozen=True)
class Cell:
    """One combination of the axes.

    `pp` is the number of pipeline ranks where there is a schedule, `dp` of data ranks: without it, two,
    and four (two copies of two ranks that share the experts) for sharded experts with ZeRO 1 and 3.
    """

    zero: int
    schedule: str
    experts: str
    model: str
    pp: int = 2
    dp: int | None = None

    @property
    def name(self) -> str:
        ranks = f"pp{self.pp}-" if self.pp != 2 and self.schedule != "none" else ""
        return f"{self.model}-zero{self.zero}-{ranks}{self.schedule}-{self.experts}"

    @property
    def program(self) -> str:
        """The model of the zoo."""
        if self.model == "recompute":
            return "deep_dropout" if self.experts == "sharded" else "deep_dense_dropout"
        return _PROGRAM.get(self.model, f"deep_{self.model}")

    @property
    def excluded(self) -> str | None:
        """Why there is no such case."""
        if self.model == "dense" and self.experts == "sharded":
            return "a dense model has no experts to shard"
        return None

    @property
    def degrees(self) -> dict[str, int]:
        """Sizes of the mesh, as `parallel` takes them."""
        pp = 1 if self.schedule == "none" else self.pp
        both = self.experts == "sharded" and self.zero % 2 and pp < 4
        sizes = {"pp": pp, "dp": self.dp or (4 if both else 2)}
        return sizes | ({"ep": 2} if self.experts == "sharded" else {})

    @property
    def microbatches(self) -> int:
        """Of one data rank: eight in all, unless the schedule needs more."""
        least = _LEAST.get(self.schedule, 1) * self.degrees["pp"]
        return max(PIECES // self.degrees["dp"], least)

    @property
    def num_ranks(self) -> int:
        return self.degrees["pp"] * self.degrees["dp"]

    def strategy(self) -> Callable[[Schedule], None]:
        options: dict[str, Any] = {"zero": self.zero}
        if self.schedule != "none":
            options["schedule"] = self.schedule
        turn = SCHEDULE.index(self.schedule) + MODEL.index(self.model)
        if self.zero >= 2:
            options["bucket_size"] = _BUCKET
            options["reduce_every"] = REDUCE_EVERY[turn % len(REDUCE_EVERY)]
        if self.zero == 3 and self.experts == "sharded":
            options |= {"prefetch": 2, "reuse": (2, "step")[turn // len(REDUCE_EVERY) % 2]}
        if self.model == "recompute":
            options["recompute"] = ("nothing", "expensive")[(self.zero + turn) % 2]
        return parallel(microbatches=self.microbatches, **self.degrees, **options)

    def job(self, device: str = "cpu") -> Job:
        program = program_of(self.program).apply(self.strategy())
        return program.lower(optimizer=ADAMW, device=device)

    def errors(self, job: Job, *, adversary: bool) -> Errors:
        """Distance from one device, with all ranks in this process; every case its own adversary."""
        seed = crc32(self.name.encode())
        with job.launch("loopback", adversary=adversary, seed=seed) as run:
            return compare(run, batches_of(self.program), reference_of(self.program, job))


ALL = [Cell(*values) for values in product(*AXES.values())]
CELLS = [cell for cell in ALL if not cell.excluded]
# A few more with a stage on each of four pipeline ranks.
LONG = [
    Cell(zero, schedule, experts, model, pp=4)
    for zero, schedule, experts, model in product(
        ZERO, ("1f1b", "zb_h1", "dualpipe"), EXPERTS, ("tied", "skips", "recompute")
    )
]


def pairs(cell: Any, axes: Iterable[str] = tuple(AXES)) -> set[tuple[str, Any, str, Any]]:
    """Every pair of the values of two axes that a case has."""
    return {(a, getattr(cell, a), b, getattr(cell, b)) for a, b in combinations(axes, 2)}


def covering(cells: list[C], axes: Iterable[str] = tuple(AXES)) -> list[C]:
    """Few cases that together have every pair: always take the one with most new pairs."""
    own = [(cell, pairs(cell, axes)) for cell in cells]
    left = set().union(*(found for _, found in own))
    chosen = []
    while left:
        best, found = max(own, key=lambda each: len(each[1] & left))
        chosen.append(best)
        left -= found
    return chosen
