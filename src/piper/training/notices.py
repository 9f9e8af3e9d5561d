"""Notices: lines of the log about batches that were not trained on as they came, and about new plans."""

from __future__ import annotations

from piper.api.run import Run
from piper.ir.tensor_type import shapes_text
from piper.runtime.launch.read_faults import ReadFaults, ReadPolicy
from piper.training.line import Log


class Notices:
    """Each is written once."""

    def __init__(self, run: Run, lines: Log, policy: ReadPolicy) -> None:
        self.run = run
        self.lines = lines
        self.policy = policy
        self._plans = len(run.compiled)
        self._partial = 0  # batches that were left out for their size
        self._unread = (0, 0)  # batches that were tried again, and left out

    def unread(self, faults: ReadFaults, step: int) -> tuple[int, int]:
        """How often reading the step's batch was tried again, and how many were left out before it, with
        a line for each."""
        self.partial(faults, step)
        retried, skipped = self._unread
        for text in faults.left_out[skipped:]:
            self.lines.warning(step, f"a batch before it was left out: {text}")
        self._unread = faults.retried, len(faults.left_out)
        if self._unread[0] > retried:
            times = self._unread[0] - retried
            often = "once" if times == 1 else f"{times} times"
            self.lines.warning(step, f"its data was read again, {often}")
        return self._unread[0] - retried, self._unread[1] - skipped

    def partial(self, faults: ReadFaults, step: int) -> None:
        """A line for each batch that was left out for its size."""
        found, plan = faults.partial, self.run.plan
        for rows in found[self._partial :]:
            why = (
                'last="drop"'
                if self.policy.partial == "drop"
                else (
                    f"does not divide into {plan.num_data_ranks} data ranks x "
                    f"{plan.num_microbatches} microbatches"
                )
            )
            self.lines.warning(step, f"a batch of {rows} samples was left out: {why}")
        self._partial = len(found)

    def compiled(self) -> float:
        """A line for each plan that was made for batches of a new shape; the seconds that it took."""
        new, self._plans = self.run.compiled[self._plans :], len(self.run.compiled)
        for found in new:
            shapes = shapes_text(found.plan.batch_shapes)
            what = "training" if found.plan.train else "evaluation"
            self.lines.note(f"compiled {what} for batches of {shapes}: {found.seconds:.1f} s")
        return sum(found.seconds for found in new)
