"""Run: workers that are up; batches in, losses out, and the model's tensors on request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from piper.api.advice import with_advice
from piper.bodies.leaves import batch_leaves
from piper.errors import OutOfMemory, RunError
from piper.plan.holdings import What
from piper.plan.types import ModelTensor, Plan
from piper.runtime.launch.pool_run import PoolRun
from piper.runtime.launch.reading import Data
from piper.runtime.launch.shares import checked_leaves
from piper.runtime.worker.assemble import differing_copies, whole_state, whole_tensors
from piper.runtime.worker.weights import initial_value

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class StepResult:
    """The loss of a step over the whole batch, and the count it was averaged over.

    `norm` is that of all gradients together, before clipping; None without clipping.
    """

    loss: float
    count: float
    norm: float | None = None


class Run:
    """Use as a context manager: leaving it ends the workers."""

    def __init__(
        self,
        plan: Plan,
        workers: PoolRun,
        evaluation: Callable[[], tuple[Plan, Mapping[str, str]]] | None = None,
    ) -> None:
        self.plan = plan
        self.workers = workers
        self._evaluation = evaluation
        self.closed = False
        self._fetched: dict[str, bool] = {}  # by role: whether the ranks hold an unused batch

    def step(self, batch: Any = None) -> StepResult:
        """Train on one global batch; without one, on what the ranks read themselves.

        Under torchrun a rank may give the global batch or its own rows of it.
        """
        leaves = self._leaves(batch, "train")
        try:
            return _result(self._open().step(leaves))
        except OutOfMemory as error:
            raise with_advice(error, self.plan) from None

    def evaluate(self, batch: Any = None) -> StepResult:
        """The loss of one batch with the model in eval() mode; nothing is trained."""
        self._open()
        plan, bodies = self._evaluated()
        leaves = self._leaves(batch, "eval")
        try:
            return _result(self._open().evaluate(plan, bodies, leaves))
        except OutOfMemory as error:
            raise with_advice(error, self.plan) from None

    def prepare_evaluation(self) -> None:
        """Get ready to evaluate, as the first `evaluate` would: what cannot be evaluated fails here."""
        self._open().load(*self._evaluated(), "eval")

    def _evaluated(self) -> tuple[Plan, Mapping[str, str]]:
        if self._evaluation is None:
            raise RunError("the run has no evaluation", legal="job.launch(...) of a training job")
        return self._evaluation()

    def read(self, data: Data, *, name: str = "train") -> None:
        """Have every rank read its own rows: from now on `step` takes no batch.

        `data(share)` gives the batches of one data rank. Worker processes import it from its file.
        """
        workers = self._open()
        if workers.reading != "members":
            raise RunError(
                "the ranks of this run have no processes of their own to read in",
                legal='launch("local") or launch("ray"); piper.train reads for all launchers',
            )
        if name == "eval":
            self.prepare_evaluation()
        workers.read(data, name)
        self._fetched[name] = False

    def fetch(self, *, name: str = "train") -> bool:
        """Have the ranks read the batch of the coming step; False if the data has ended."""
        workers = self._open()
        if name not in self._fetched:
            raise RunError("the ranks read no data", legal="step(batch), or read(data) before")
        self._fetched[name] = self._fetched[name] or workers.fetch(name)
        return self._fetched[name]

    def set_options(self, options: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """From the next step on, all parameter groups have these values, such as {"lr": 3e-4}, or each
        its own, in the order of `plan.param_groups`."""
        self._open().set_options(options)

    def memory(self) -> list[dict[str, int]]:
        """Per rank: bytes by what they are for, and the `peak`."""
        return self._open().memory()

    def describe(self) -> list[dict[str, str]]:
        """Per rank: the name of its device, and an identity that no other device has."""
        return self._open().describe()

    def _open(self) -> PoolRun:
        """The workers, unless they have ended."""
        if self.closed:
            raise RunError(
                "the run is closed, and its ranks hold nothing any more",
                legal="calls inside of the with block, or before run.close()",
            )
        return self.workers

    def _leaves(self, batch: Any, name: str) -> dict[str, Tensor] | None:
        self._open()
        if batch is not None:
            return self.checked(batch)
        if self.workers.reading == "rank":
            return None  # a rank that needs none
        if not self.fetch(name=name):
            raise RunError("the data has ended", legal="fetch() says so before a step")
        self._fetched[name] = False
        return None

    def checked(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of a global batch, or where this process is one rank, maybe of its rows of it, if
        they are like those of the example batch."""
        if self.workers.reading == "rank":
            sizes = {leaf.shape[0] for leaf in batch_leaves(batch).values() if leaf.dim()}
            parts = self.plan.num_data_ranks
            wanted = {leaf.shape[0] // parts for leaf in self.plan.batch.values()}
            if sizes == wanted:
                return checked_leaves(self.plan, batch, parts=parts)
        return checked_leaves(self.plan, batch)

    def parameters(self) -> dict[str, Tensor]:
        """All parameters, whole, by the model's own names; what no step reads is as it was made."""
        return self._of_the_model("param")

    def buffers(self) -> dict[str, Tensor]:
        """All buffers, likewise."""
        return self._of_the_model("buffer")

    def masters(self) -> dict[str, Tensor]:
        """All trained parameters, whole, in the dtype in which they are stepped."""
        return self._whole("master")

    def ema(self) -> dict[str, Tensor]:
        """All parameters, whole: of those that are trained their moving averages, in the dtype in which
        they are stepped."""
        if self.plan.ema is None:
            raise RunError("the run keeps no moving averages", legal="program.lower(ema=0.999)")
        averages = self._whole("average")
        return self.parameters() | averages

    def gradients(self) -> dict[str, Tensor]:
        """The averaged gradients of the last step, whole."""
        return self._whole("grad")

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Per trained parameter, what its optimizer keeps, whole and by torch's names, such as
        `exp_avg`; before the first step, nothing."""
        state = whole_state(self.plan, self.workers.tensors("state"))
        return {unquote(name): pieces for name, pieces in state.items()}

    def differing_replicas(self) -> list[str]:
        """Names of parameters and buffers whose copies are not bit-equal; empty is right."""
        kinds: tuple[What, ...] = ("param", "buffer")
        found = (differing_copies(self.plan, what, self._open().tensors(what)) for what in kinds)
        return [unquote(name) for names in found for name in names]

    def _of_the_model(self, what: What) -> dict[str, Tensor]:
        held, whole = self._whole(what), {}
        for name, tensor in self.plan.tensors.items():
            if tensor.buffer == (what == "buffer"):
                own = unquote(name)
                whole[own] = held[own] if own in held else self._initial(tensor)
        return whole

    def _initial(self, tensor: ModelTensor) -> Tensor:
        return initial_value(tensor, self.workers.bodies, seed=self.plan.seed)

    def _whole(self, what: What) -> dict[str, Tensor]:
        """What the ranks hold of a kind, by the model's own names."""
        found = whole_tensors(self.plan, what, self._open().tensors(what))
        return {unquote(name): tensor for name, tensor in found.items()}

    def close(self) -> None:
        self.closed = True
        self.workers.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _result(results: list[dict[str, float]]) -> StepResult:
    losses = {result["loss"] / result["count"] for result in results}
    if len(losses) != 1 and all(loss == loss for loss in losses):
        raise RunError(f"ranks disagree about the loss: {sorted(losses)}")
    count = results[0]["count"]
    squares = results[0].get("squares")
    norm = None if squares is None else math.sqrt(squares) / count
    return StepResult(results[0]["loss"] / count, count, norm)
