"""Elastic: training that goes on with the ranks that are left, and takes more when they come back."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from piper.errors import RankLost, RunError

if TYPE_CHECKING:
    from piper.api.job import Job
    from piper.training.records import Training

IN_A_ROW = 3  # attempts that are lost before a new step: another one will not help


@dataclass
class Elastic:
    """Takes the place of a Job in `piper.train`, which saves checkpoints then.

    `jobs(n)` gives the job for `n` ranks, or for fewer, or None where n are too few; all with as many
    global microbatches, so that training does not depend on how many ranks there are. `ranks` is how
    many there may be. `available()` says how many could be had now: it is asked before training begins,
    after a loss, and at each checkpoint. Without it, a rank that was lost comes back at the next one, or
    at once if the others are too few.
    """

    jobs: Callable[[int], Job | None]
    ranks: int
    available: Callable[[], int] | None = None
    made: dict[int, Job | None] = field(default_factory=dict, repr=False)

    def job(self, num_ranks: int) -> Job | None:
        """The job for at most so many ranks, which is made once."""
        if num_ranks not in self.made:
            self.made[num_ranks] = self.jobs(num_ranks) if num_ranks > 0 else None
        return self.made[num_ranks]

    def largest(self, num_ranks: int) -> Job:
        """The same, which there must be."""
        job = self.job(num_ranks)
        if job is None:
            raise RunError(
                f"no strategy for {num_ranks} rank{'s' if num_ranks != 1 else ''}",
                legal="more ranks, or a function that has strategies for fewer",
            )
        if job.plan.mesh.size > num_ranks:
            raise RunError(
                f"the job for {num_ranks} ranks has {job.plan.mesh.size}",
                legal="a job for at most as many ranks as are asked for",
            )
        return job

    def at_hand(self) -> int:
        """How many ranks could be had now."""
        return self.ranks if self.available is None else min(self.ranks, self.available())


class Attempt:
    """One job of an elastic training: from its launch until it ends, loses a rank, or could have more
    ranks."""

    def __init__(self, elastic: Elastic, job: Job, lost_at: float | None) -> None:
        self.elastic = elastic
        self.job = job
        self.lost_at = lost_at  # when the attempt before failed
        self.outgrown = False  # it ended for a larger one
        self.done = 0  # the last step, with those before this attempt

    def wants_more(self) -> bool:
        """Whether a larger job could run now."""
        at_hand = self.elastic.at_hand()
        size = self.job.plan.mesh.size
        found = self.elastic.job(at_hand) if at_hand > size else None
        return found is not None and found.plan.mesh.size > size

    def stepped(self, done: int) -> str:
        """After a step: what there is to say of a loss that it comes after."""
        self.done = done
        if self.lost_at is None:
            return ""
        seconds, self.lost_at = time.perf_counter() - self.lost_at, None
        ranks, most = self.job.plan.mesh.size, self.elastic.ranks
        return f"went on {seconds:.1f} s after the loss, with {ranks} of {most} ranks"


def attempts(elastic: Elastic, train: Callable[[Attempt], Training]) -> Training:
    """Train until it is done, with as many ranks as there are."""
    ranks, lost_at, furthest, in_a_row = elastic.at_hand(), None, 0, 0
    while True:
        attempt = Attempt(elastic, elastic.largest(ranks), lost_at)
        lost_at = None
        try:
            training = train(attempt)
        except RankLost as error:
            lost_at = attempt.lost_at or time.perf_counter()
            in_a_row = 0 if attempt.done > furthest else in_a_row + 1
            furthest = max(furthest, attempt.done)
            if in_a_row >= IN_A_ROW:
                raise
            left = attempt.job.plan.mesh.size - max(1, len(error.ranks))
            enough = elastic.available is None and elastic.job(left) is not None
            ranks = left if enough else elastic.at_hand()
            continue
        if not attempt.outgrown:
            return training
        ranks = elastic.at_hand()
