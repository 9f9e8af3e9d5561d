"""Run: workers that are up; batches in, losses out, and the model's tensors on request."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from piper.api.advice import with_advice
from piper.api.recording import Recording
from piper.api.saving import Saving
from piper.api.shaped_plans import Purpose, ShapedPlan, ShapedPlans
from piper.api.step_result import StepResult, StepUnderWay, step_result
from piper.api.weights_out import save_weights
from piper.errors import OutOfMemory, PiperError, RunError, naming_line
from piper.ir.form.card import text_card
from piper.ir.history import ranks_text
from piper.ir.precisions import Precision
from piper.ir.tensor_type import Shapes, shapes_text
from piper.plan.holdings import What
from piper.plan.types import Plan
from piper.runtime.failure.nan_origin import origin_text
from piper.runtime.launch.marks import Mark
from piper.runtime.launch.pool_run import PoolRun
from piper.runtime.launch.read_faults import ReadPolicy
from piper.runtime.launch.reading import Data
from piper.runtime.launch.shares import checked_leaves, shapes_of
from piper.runtime.worker.assemble import differing_copies, whole_state, whole_tensors
from piper.runtime.worker.predicted_rows import assembled_predictions
from piper.runtime.worker.weights import Weights
from piper.stored.writers import Entry, entries_by_rank, is_held_by

if TYPE_CHECKING:
    from torch import Tensor

    from piper.stored.manifest import Manifest

T = TypeVar("T")
UNDER_WAY = 2  # steps: one runs, and the next one is dispatched


class Run:
    """Use as a context manager: leaving it ends the workers.

    `plan` is that of batches like the example batch. Batches of another shape get a plan of their own
    from `plans`; all plans train the same parameters.
    """

    def __init__(self, plan: Plan, workers: PoolRun, plans: ShapedPlans | None = None) -> None:
        self.plan = plan
        self.workers = workers
        self.plans = plans
        self.trained = plan  # the plan of the last step
        self.compiled: list[ShapedPlan] = []  # for batches of other shapes
        self.closed = False
        self.resumed: Manifest | None = None  # what it goes on from, if it was saved before
        self.resumed_from: str | None = None  # and the folder of that
        self.steps = workers.stored.steps if workers.stored else 0  # done so far
        self.evaluations = workers.stored.evaluations if workers.stored else 0
        # By purpose: shapes of the batch that the ranks have read and not used, if any.
        self._fetched: dict[str, Shapes] = {}
        self._shares: dict[str, bool] = {}  # by purpose: whether a rank gives its own rows alone
        self._begun: deque[StepUnderWay] = deque()  # steps that nobody has waited for
        self._recording: Recording | None = None  # of the steps that come
        self._skipped: tuple[Any, str] | None = (
            None  # the last step, if it was: its leaves and role
        )

    def step(self, batch: Any = None, *, skip_nan: bool = False) -> StepResult:
        """Train on one global batch; without one, on what the ranks read themselves.

        Under torchrun a rank may give the global batch or its own rows of it. A plan for batches of
        another shape than any before is compiled first.
        With `skip_nan` a step whose gradients are not finite changes nothing: parameters, optimizer
        state, buffers and the number of steps stay as they were, and `origin_of_nan` can say where it
        began. That takes their norm, which jobs with `lower(clip=...)` measure.
        """
        if skip_nan and self.plan.clip is None:
            raise RunError(
                "the run does not measure the norm of gradients, by which steps are skipped",
                legal="lower(clip=1.0), or lower(clip=math.inf), which measures it and clips nothing",
            )
        with self._advised():
            with naming_line("run.step"):
                leaves, role = self._to_train(batch)
            with self._recorded(role):
                guard = "skip" if skip_nan else ""
                result = step_result(self._open().step(leaves, role=role, guard=guard))
        self.steps += not result.skipped
        self._skipped = (leaves, role) if result.skipped else None
        return result

    def begin(self, batch: Any = None) -> StepUnderWay:
        """Have a step begin, as `step` would do it; `result()` of what is returned waits for its end.

        With the next step begun before that, a GPU goes from one to the other without waiting for this
        process. Two are under way at most. Whatever else is asked of the run waits for them. A batch
        on the GPU has to stay as it is until then.
        """
        begun = StepUnderWay(self._finish_first)
        if self.is_recording:
            begun.end(self.step(batch))
            return begun
        while len(self._begun) >= UNDER_WAY:
            self._finish_first()
        with self._advised():
            with naming_line("run.begin"):
                leaves, role = self._to_train(batch)
            self.workers.begin(leaves, role=role)
        self.steps += 1
        self._skipped = None
        self._begun.append(begun)
        return begun

    def _finish_first(self) -> None:
        """Wait for the step that was begun first; if that fails, those behind it have, too."""
        try:
            with self._advised():
                found = self._alive().finish()
        except BaseException as error:
            while self._begun:
                self._begun.popleft().fail(error)
            raise
        first = self._begun.popleft()
        try:
            first.end(step_result(found))
        except RunError as error:
            first.fail(error)
            raise

    def _to_train(self, batch: Any) -> tuple[dict[str, Tensor] | None, str]:
        """The tensors that a step was given, if any, and what the ranks call the plan for them."""
        leaves, shapes = self._given(batch, "train")
        role = self._ready("train", shapes)
        self.trained = self.workers.plans[role]
        return leaves, role

    @contextmanager
    def _advised(self) -> Iterator[None]:
        """Where memory runs out, the error says what would take less."""
        try:
            yield
        except OutOfMemory as error:
            raise with_advice(error, self.plan) from None

    def origin_of_nan(self) -> str:
        """Of the step that was skipped just now: the first value that is not finite, with the rank and
        the task that made it and the directive that the task came from. The step is run again for it."""
        if self._skipped is None:
            raise RunError(
                "the last step was not skipped", legal="run.step(batch, skip_nan=True) before"
            )
        leaves, role = self._skipped
        results = self.workers.of_all(self._open().step(leaves, role=role, guard="check"))
        return origin_text(self.workers.plans[role], [c for r in results for c in r["culprits"]])

    @property
    def is_recording(self) -> bool:
        """Whether coming steps are measured."""
        return self._recording is not None and not self._recording.over

    def record(self, steps: int | None = None) -> Recording:
        """Measure the coming steps, task by task: `timeline` of what is returned has them, once they are
        over. As a context manager it is of the steps in its block, at most `steps`."""
        self._open()
        if self.is_recording:
            raise RunError("the run records already", legal="record() after those steps")
        self._recording = Recording(self.workers, steps)
        return self._recording

    def _recorded(self, role: str) -> AbstractContextManager[None]:
        """While a step runs."""
        if self._recording is None or self._recording.over:
            self._recording = None
            return nullcontext()
        return self._recording.step(role)

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        wait: bool = True,
        training: Mapping[str, Any] = {},
    ) -> Saving:
        """Write all that it takes to go on, under any strategy: `job.resume(folder)`.

        Every rank writes its part. Without `wait` they write beside the coming steps, from copies, and
        `done()` of what is returned must be asked until it is true. `training` is kept as it is.
        """
        self._open()
        saving = Saving(self, folder, training)
        if wait:
            saving.wait()
        return saving

    def rescue(
        self, folder: str | os.PathLike[str], survivors: Sequence[int], training: Mapping[str, Any]
    ) -> Path | None:
        """After a failure, save what the ranks hold that are left, as `save` does; None if they do not
        hold everything, or were in the middle of changing it."""
        if not self.workers.spares or not is_held_by(self.plan, survivors):
            return None
        if self.workers.settled_steps(survivors) - {None} != {self.steps}:
            return None
        return Saving(self, folder, training, survivors).wait()

    def save_weights(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        shard_size: int | str = "5GB",
    ) -> Path:
        """Write the model's tensors as safetensors, each rank those that it holds, in files of at most
        `shard_size`. Trained parameters are written as their masters are, or floating-point tensors in
        a `dtype`. A Hugging Face model gets its config.json, so that `from_pretrained(folder)` reads it.
        """
        self._open()
        return save_weights(self, folder, dtype=dtype, shard_size=shard_size)

    def state_dict(self) -> dict[str, Tensor]:
        """What the model's `state_dict()` would have, whole and in this process: trained parameters as
        their masters are, and the buffers that are saved."""
        found = self.parameters() | self.buffers()
        found |= self.masters() if self.plan.train else {}
        return {name: found[unquote(tensor)] for name, tensor in self.plan.state_names.items()}

    def agreed(self, act: Callable[[], T]) -> T:
        """What one process does for all: its result, or its error."""
        if self.workers.reading != "rank":
            return act()
        pool: Any = self.workers.pool
        found: tuple[str, Any] = ("", None)
        if pool.rank == 0:
            try:
                found = ("done", act())
            except PiperError as error:
                found = ("failed", error)
        status, value = pool.from_first(found)
        if status == "failed":
            raise value
        result: T = value
        return result

    def evaluate(self, batch: Any = None, *, ema: bool = False) -> StepResult:
        """The loss of one batch with the model in eval() mode; nothing is trained.

        With `ema` parameters hold their moving averages, which are brought to all ranks for it.
        """
        if ema:
            with self._averaged():
                return self.evaluate(batch)
        with naming_line("run.evaluate"):
            self._check_evaluation()
            leaves, shapes = self._given(batch, "eval")
        with self._advised():
            role = self._ready("eval", shapes)
            result = step_result(self._open().evaluate(leaves, role=role))
        self.evaluations += 1
        return result

    def predict(self, batch: Any, predict: Callable[[Any, Any], Any], *, ema: bool = False) -> Any:
        """What `predict(model, batch)` returns for a global batch, with the model in eval() mode, under
        the same strategy and on the live parameters: a tensor, or a tuple or dictionary of tensors, each
        with a row for each sample, in the order of the batch.

        The batch need not have all that training reads. A plan is compiled for each function, with the
        values that it and functions of its own module read, and each shape of batches. With `ema`
        parameters hold their moving averages.
        """
        if ema:
            with self._averaged():
                return self.predict(batch, predict)
        with naming_line("run.predict"):
            self._check_evaluation()
            assert self.plans is not None
            found = self.plans.prediction(predict, batch)
            leaves = checked_leaves(found.plan, batch)
        self.workers.load(found.plan, found.bodies, found.role)
        with self._advised():
            results = self._open().evaluate(leaves, role=found.role)
        self.evaluations += 1
        return assembled_predictions(found.plan, self.workers.of_all(results))

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """While parameters hold their moving averages."""
        self._check_averages()
        self._check_evaluation()
        self.workers.lend(whole_tensors(self.plan, "average", self.workers.tensors("average")))
        try:
            yield
        finally:
            if not self.workers.failed:
                self.workers.take_back()

    def prepare_evaluation(self) -> None:
        """Get ready to evaluate, as the first `evaluate` would: what cannot be evaluated fails here."""
        self._check_evaluation()
        self._ready("eval", self.plan.batch_shapes)

    def _check_evaluation(self) -> None:
        self._open()
        if self.plans is None:
            raise RunError("the run has no evaluation", legal="job.launch(...) of a training job")

    def _ready(self, purpose: Purpose, shapes: Shapes) -> str:
        """What the ranks call the plan for batches of these shapes, which they have then."""
        if purpose == "train" and shapes == self.plan.batch_shapes:
            return "train"
        if self.plans is None:
            raise RunError(
                f"a batch of {shapes_text(shapes)}",
                legal=f"{shapes_text(self.plan.batch_shapes)}, as in the example batch",
            )
        found = self.plans.of(purpose, shapes)
        if found.role not in self.workers.plans:
            self._open().load(found.plan, found.bodies, found.role)
            if shapes != self.plan.batch_shapes:
                self.compiled.append(found)
        return found.role

    def read(
        self,
        data: Data,
        *,
        name: str = "train",
        marks: Sequence[Mark] = (),
        policy: ReadPolicy | None = None,
    ) -> None:
        """Have every rank read its own rows: from now on `step` takes no batch.

        `data(share)` gives the batches of one data rank, from its mark on if there are `marks`. Worker
        processes import it from its file. `policy` says what becomes of batches that cannot be read.
        """
        workers = self._open()
        if workers.reading != "members":
            raise RunError(
                "the ranks of this run have no processes of their own to read in",
                legal='launch("local") or launch("ray"); piper.train reads for all launchers',
            )
        if name == "eval":
            self.prepare_evaluation()
        workers.read(data, name, marks=marks, policy=policy)
        self._fetched[name] = ()

    def fetch(self, *, name: str = "train") -> bool:
        """Have the ranks read the batch of the coming step; False if the data has ended."""
        workers = self._alive()
        if name not in self._fetched:
            raise RunError("the ranks read no data", legal="step(batch), or read(data) before")
        self._fetched[name] = self._fetched[name] or workers.fetch(name)
        return bool(self._fetched[name])

    def set_options(self, options: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """From the next step on, all parameter groups have these values, such as {"lr": 3e-4}, or each
        its own, in the order of `plan.param_groups`."""
        with naming_line("run.set_options"):
            self._alive().set_options(options)

    def memory(self) -> list[dict[str, int]]:
        """Per rank: bytes by what they are for, and the `peak`."""
        return self._open().memory()

    def bytes_read(self) -> list[int]:
        """Per rank: bytes of weights that it took from files."""
        return self._open().bytes_read()

    def describe(self) -> list[dict[str, str]]:
        """Per rank: the name of its device, and an identity that no other device has."""
        return self._open().describe()

    def _open(self) -> PoolRun:
        """The workers, unless they have ended; no step is under way any more."""
        workers = self._alive()
        while self._begun:
            self._finish_first()
        return workers

    def _alive(self) -> PoolRun:
        """The workers, unless they have ended."""
        if self.closed:
            raise RunError(
                "the run is closed, and its ranks hold nothing any more",
                legal="calls inside of the with block, or before run.close()",
            )
        return self.workers

    def _given(self, batch: Any, name: str) -> tuple[dict[str, Tensor] | None, Shapes]:
        """The tensors that a step was given, if any, and the shapes of its global batch."""
        reading = self._alive().reading
        leaves, shapes = (None, ()) if batch is None else self.checked(batch, name)
        if reading == "rank":
            known = self.plans.shapes if self.plans else [self.plan.batch_shapes]
            pool: Any = self.workers.pool
            return leaves, pool.shapes(shapes, known)
        if batch is None:
            if not self.fetch(name=name):
                raise RunError("the data has ended", legal="fetch() says so before a step")
            shapes, self._fetched[name] = self._fetched[name], ()
        return leaves, shapes

    def checked(self, batch: Any, name: str = "train") -> tuple[dict[str, Tensor], Shapes]:
        """The tensors of a global batch or, where this process is one rank, maybe of its rows of it, if
        they are like those of the example batch; and the shapes of the global one."""
        leaves = checked_leaves(self.plan, batch)
        parts = self.plan.num_data_ranks
        if self.workers.reading != "rank" or parts == 1:
            return leaves, shapes_of(self.plan, leaves)
        key = next(iter(self.plan.batch))
        rows, whole = leaves[key].shape[0], self.plan.batch[key].shape[0]
        if name not in self._shares:  # the first batch tells; a last one may be smaller
            if rows not in (whole, whole // parts):
                raise RunError(
                    f"the first batch has {rows} samples",
                    legal=f"{whole} as in the example batch, or {whole // parts}: this rank's rows",
                )
            self._shares[name] = rows != whole
        return leaves, shapes_of(self.plan, leaves, parts=parts if self._shares[name] else 1)

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
        self._check_averages()
        return self.parameters() | self._whole("average")

    def _check_averages(self) -> None:
        if self.plan.ema is None:
            raise RunError("the run keeps no moving averages", legal="program.lower(ema=0.999)")

    def gradients(self) -> dict[str, Tensor]:
        """The averaged gradients of the last step, whole."""
        return self._whole("grad")

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Per trained parameter, what its optimizer keeps, whole and by torch's names, such as
        `exp_avg`; before the first step, nothing."""
        state = whole_state(self.plan, self._open().tensors("state"))
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
                whole[own] = held[own] if own in held else self._weights.as_held(name)
        return whole

    @cached_property
    def entries(self) -> list[list[Entry]]:
        """What each rank writes of the state, while there are all of them."""
        return entries_by_rank(self.plan)

    @property
    def has_unheld(self) -> bool:
        """Whether some tensors are held by no rank, because no step uses them."""
        return any(entry.holding < 0 for mine in self.entries for entry in mine)

    @cached_property
    def _weights(self) -> Weights:
        """For tensors that no rank holds."""
        return Weights(self.plan, self.workers.bodies, self.workers.stored, self.workers.in_memory)

    def _whole(self, what: What) -> dict[str, Tensor]:
        """What the ranks hold of a kind, by the model's own names."""
        found = whole_tensors(self.plan, what, self._open().tensors(what))
        return {unquote(name): tensor for name, tensor in found.items()}

    def close(self) -> None:
        self.closed = True
        self.workers.close()

    def __repr__(self) -> str:
        ranks = f"{ranks_text(self.plan.history, self.plan.mesh)} on {self.plan.device}"
        if self.plan.precision != Precision():
            ranks += f", precision {self.plan.precision}"
        return (
            f"<Run of plan {self.plan.content_hash()}: {ranks}{', closed' if self.closed else ''}>"
        )

    def _repr_html_(self) -> str:
        """For notebooks: the same as a card."""
        return text_card(repr(self))

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None and self._begun:
                self._open()  # a step that fails is an error, whether its result was asked for or not
        finally:
            self.close()
