"""ShapedPlans: a job and the shapes of a batch in, the plan for such batches out, compiled once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, Literal

from piper.bodies.leaves import batch_constants, batch_leaves
from piper.errors import Call, CheckError, RunError, user_source
from piper.ir.tensor_type import Shapes, shapes_text
from piper.plan.types import Plan

if TYPE_CHECKING:
    from piper.api.job import Job

SHAPES = 8  # of how many shapes batches may be, unless the user says
FOLLOWED = 64  # functions that one of a prediction calls, whose code and values are looked at
Purpose = Literal["train", "eval"]


@dataclass(frozen=True)
class ShapedPlan:
    """A plan and its bodies; `role` is what the ranks call it, `seconds` what it took to compile."""

    role: str
    plan: Plan
    bodies: Mapping[str, str]
    seconds: float


class ShapedPlans:
    """All plans of a run: for training and for evaluation, one per shape of batches, at most `limit`."""

    def __init__(self, job: Job, limit: int = SHAPES) -> None:
        self.job = job
        self.limit = limit
        self.shapes = [job.plan.batch_shapes]  # in the order in which they came
        self._plans: dict[tuple[Purpose, Shapes], ShapedPlan] = {}
        self._predictions: dict[Any, ShapedPlan] = {}

    def of(self, purpose: Purpose, shapes: Shapes) -> ShapedPlan:
        """The plan for batches of these shapes."""
        if (purpose, shapes) not in self._plans:
            if shapes not in self.shapes:
                self._check(shapes)
            begin = time.perf_counter()
            with _naming_batch("run.step" if purpose == "train" else "run.evaluate", shapes):
                job = self.job.shaped(shapes, training=purpose == "train")
            seconds = time.perf_counter() - begin
            if shapes not in self.shapes:
                self.shapes.append(shapes)
            number = self.shapes.index(shapes)
            role = f"{purpose} {number + 1}" if number else purpose
            self._plans[purpose, shapes] = ShapedPlan(role, job.plan, job.bodies, seconds)
        return self._plans[purpose, shapes]

    def prediction(self, predict: Callable[[Any, Any], Any], batch: Any) -> ShapedPlan:
        """The plan for what a function predicts of batches like this one."""
        leaves = batch_leaves(batch)
        types = tuple((name, leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves.items())
        key = (_function_key(predict), types, tuple(batch_constants(batch).items()))
        if key not in self._predictions:
            if len(self._predictions) == self.limit:
                raise RunError(
                    f"{self.limit} plans are compiled for predictions already, one for each function "
                    "and shape of batches",
                    legal="one function at the top level of a file, and batches of a few shapes; or "
                    "launch(..., shapes=N)",
                )
            begin = time.perf_counter()
            shapes = tuple((name, tuple(leaf.shape)) for name, leaf in leaves.items())
            with _naming_batch("run.predict", shapes):
                job = self.job.prediction(predict, batch)
            role = f"predict {len(self._predictions) + 1}"
            seconds = time.perf_counter() - begin
            self._predictions[key] = ShapedPlan(role, job.plan, job.bodies, seconds)
        return self._predictions[key]

    def _check(self, shapes: Shapes) -> None:
        plan = self.job.plan
        (_, (rows, *_)), *_ = shapes
        pieces = plan.num_data_ranks * plan.num_microbatches
        if rows % pieces or not rows:
            raise RunError(
                f"a batch of {rows} samples does not divide into {plan.num_data_ranks} data ranks x "
                f"{plan.num_microbatches} microbatches",
                legal=f"a multiple of {pieces}; a DataLoader with drop_last=True has no smaller batch",
            )
        if len(self.shapes) == self.limit:
            known = [shapes_text(known) for known in self.shapes]
            raise RunError(
                f"a batch of {shapes_text(shapes)}: of another shape than the {self.limit} so far, "
                "and a plan is compiled for each",
                details=known,
                legal="batches padded to a few lengths, or launch(..., shapes=N)",
            )


@contextmanager
def _naming_batch(name: str, shapes: Shapes) -> Iterator[None]:
    """A plan that cannot be proved, as where it needs more memory than the job's limit, has its error
    name the batch that it is for, and the user's line that gives that."""
    try:
        yield
    except CheckError as error:
        message = f"a batch of {shapes_text(shapes)}: {error.message}"
        error.reword(message, error.details, error.legal and f"a smaller batch, {error.legal}")
        source = user_source()
        if source is not None:
            error.at(Call(name, source))
        raise


def _function_key(function: Any) -> Any:
    """The same for a function that is written once, however often it is made, if all that it does is in
    its code. What that reads of its module is part of the key, and so is what functions of the same
    module read that it calls: a plan has it as it was traced."""
    if not isinstance(function, FunctionType):
        return function
    followed: list[Any] = [function]
    key = []
    for each in followed:  # which grows
        known, read = each.__globals__, list[tuple[str, Any]]()
        for name in dict.fromkeys(_names(each.__code__)):
            if name not in known:  # an attribute, or a builtin
                continue
            value = known[name]
            own = isinstance(value, FunctionType) and value.__globals__ is known
            if own and value not in followed and len(followed) < FOLLOWED:
                followed.append(value)
            there = own and value in followed
            read.append((name, followed.index(value) if there else _value_key(value)))
        holds = each.__closure__ or each.__defaults__ or each.__kwdefaults__
        key.append((each if holds else each.__code__, tuple(read)))
    return tuple(key)


def _names(code: CodeType) -> Iterator[str]:
    """What code may read of its module, with the code inside of it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _value_key(value: Any) -> Any:
    """Plain values by what they are; all else by which it is."""
    plain = (int, float, str, bytes, bool, complex, type(None))
    return (type(value), value) if isinstance(value, plain) else _Itself(value)


@dataclass(frozen=True, eq=False)
class _Itself:
    """Equal to what holds the same object."""

    value: Any

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value
