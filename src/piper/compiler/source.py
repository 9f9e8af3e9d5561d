"""Source: the user's model, batch and step, captured once per batch shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from piper.bodies.chunk_code import spec_of
from piper.bodies.leaves import batch_leaves, users_name, with_shapes
from piper.bodies.store import BodyStore
from piper.compiler.captures import Captures, rename
from piper.errors import TraceError
from piper.frontend.batch_layouts import batch_layouts
from piper.frontend.build import build_graph
from piper.frontend.capture.capture import (
    Capture,
    Step,
    alike,
    first_difference,
    plain_name,
)
from piper.frontend.capture.step_results import PredictStep
from piper.frontend.cut.stage_choice import StageCut
from piper.frontend.refuse.refusals import call_of
from piper.frontend.tensor_cut import TensorCut, TensorCuts
from piper.frontend.traced import Traced, cut_program
from piper.ir.graph import Graph
from piper.ir.tensor_type import Shapes, TensorType, shapes_text
from piper.plan.optimizers import Grouping, Optimizer
from piper.plan.types import ModelTensor
from piper.runtime.factory import Factory, resolve_optimizer

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Cuts:
    """Where a program is cut beyond its tags.

    `stages` as the directive cut chose them; then, per chunk number, the most bytes of parameters that
    a piece of the chunk may read; and pairs of chunks, the first cut behind the counts of the second.
    `tensors` says what one rank of an axis that shares tensors runs. Before, the chunks of `calls` are
    cut around checkpointed calls, and around the layers that each group of `layers` runs through, which
    are computed again one by one.
    """

    pieces: tuple[tuple[int, int], ...] = ()
    stages: StageCut | None = None
    counts: tuple[tuple[int, int], ...] = ()
    tensors: tuple[TensorCut, ...] = ()
    calls: tuple[int, ...] = ()
    layers: tuple[tuple[int, ...], ...] = ()

    @property
    def finer(self) -> bool:
        """Whether chunks of the program are cut further."""
        return bool(self.pieces or self.counts or self.tensors or self.layers)

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along each axis that shares tensors."""
        return {each.axis: each.size for each in self.tensors}


UNCUT = Cuts()
# dtype, float32_operators, training, frozen, of the batch
Variant = tuple[str, bool, bool, frozenset[str], Shapes]


class Source:
    """Captures at any number of rows, and the bodies made from them; nothing is made twice.

    `dtype` is what the model computes in ("" as it is written), with `float32_operators` all but losses,
    norms and the like; without `training` it is in eval(); `frozen` parameters get no gradient.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        batch: Any,
        step: Step,
        *,
        stages: str,
        dtype: str = "",
        float32_operators: bool = False,
        training: bool = True,
        frozen: frozenset[str] = frozenset(),
        trained: Source | None = None,
        captures: Captures | None = None,
        like: Source | None = None,
    ) -> None:
        self.make_model = make_model
        self.step = step
        self.batch = batch
        self.stages = stages
        self.bodies = BodyStore()
        self.leaves = batch_leaves(batch)
        self.batch_size = _batch_size(self.leaves)
        self.dtype = dtype
        self.training = training
        self.like = like  # of the same model: where stages begin is said of its code
        self.guessed = False
        key = (dtype, float32_operators, training, frozen, self.shapes)
        self._variants: dict[Variant, Source] = {key: self}
        self._captures: Captures = captures or Captures(
            make_model,
            batch,
            step,
            batch_size=self.batch_size,
            dtype=dtype,
            float32_operators=float32_operators,
            training=training,
            frozen=frozen,
            trained=trained._captures if trained else None,
        )
        self._traced: dict[tuple[int, Cuts], Traced] = {}
        self._tensor_cuts = TensorCuts()

    @property
    def shapes(self) -> Shapes:
        """Of the leaves of a global batch."""
        return tuple((name, tuple(leaf.shape)) for name, leaf in self.leaves.items())

    def variant(
        self,
        *,
        dtype: str,
        training: bool,
        cut: StageCut | None,
        float32_operators: bool = False,
        frozen: frozenset[str] = frozenset(),
        shapes: Shapes | None = None,
    ) -> Source:
        """The same program computing in another dtype, in eval(), with fewer gradients or on batches of
        other shapes; its chunks must be the same."""
        shapes = shapes or self.shapes
        key = (dtype, float32_operators, training, frozen, shapes)
        of_training = (dtype, float32_operators, True, frozen, shapes)
        if key not in self._variants:
            self._variants[key] = Source(
                self.make_model,
                self.batch if shapes == self.shapes else with_shapes(self.batch, shapes),
                self.step,
                stages=self.stages,
                dtype=dtype,
                float32_operators=float32_operators,
                training=training,
                frozen=frozen,
                trained=None if training else self._variants.get(of_training),
                captures=self._other_rows(key),
            )
        variant = self._variants[key]
        if variant is not self:
            self._check_chunks(variant, Cuts(stages=cut))
        return variant

    def predicting(
        self,
        predict: PredictStep,
        batch: Any,
        *,
        dtype: str,
        cut: StageCut | None,
        float32_operators: bool = False,
        frozen: frozenset[str] = frozenset(),
    ) -> Source:
        """What the same model predicts for batches like `batch`; its chunks must be the same."""
        found = Source(
            self.make_model,
            batch,
            predict,
            stages=self.stages,
            dtype=dtype,
            float32_operators=float32_operators,
            training=False,
            frozen=frozen,
            like=self,
        )
        cuts = Cuts(stages=cut)
        _, mine = self.at(self.batch_size, cuts)
        _, theirs = found.at(found.batch_size, cuts)
        if [(c.tags, c.part) for c in mine.chunks] != [(c.tags, c.part) for c in theirs.chunks]:
            raise TraceError(
                "predict runs other regions of the model than step does",
                call=call_of(predict),
                legal="the whole model, as in step: model(batch[...])",
            )
        return found

    def _other_rows(self, key: Variant) -> Captures | None:
        """Captures that serve a variant too, since they are of another number of rows alone."""
        for known, source in self._variants.items():
            if known[:-1] == key[:-1] and _samples(known[-1]) == _samples(key[-1]):
                return source._captures
        return None

    def _check_chunks(self, other: Source, cuts: Cuts) -> None:
        one, mine = self.at(self.batch_size, cuts)
        two, theirs = other.at(other.batch_size, cuts)
        same = [(c.tags, c.part) for c in mine.chunks] == [(c.tags, c.part) for c in theirs.chunks]
        # Positions where stages begin mean the same only in the same trace.
        if not same or (cuts.stages is not None and not alike(one, two)):
            how = f"in {other.dtype}" if other.dtype else "with parameters that are not trained"
            how = how if other.training else "in eval() mode"
            how = how if other.shapes == self.shapes else f"for {shapes_text(other.shapes)}"
            raise TraceError(
                f"the model's structure is another one {how}",
                details=[f"first difference at {first_difference(one, two)}"],
                legal="the same modules under the same tags",
            )

    @property
    def batch_specs(self) -> dict[str, TensorType]:
        """The leaves of a global batch, as the program takes them."""
        leaves = {}
        for name, leaf in self.leaves.items():
            dtype = str(leaf.dtype).removeprefix("torch.")
            cast = self.dtype if leaf.is_floating_point() and self.dtype else dtype
            leaves[name] = TensorType(tuple(leaf.shape), cast)
        return leaves

    def captured(self, rows: int) -> Capture:
        """The uncut program for batches of `rows` samples."""
        return self._captures.at(rows)

    def at(self, rows: int, cuts: Cuts = UNCUT) -> tuple[Capture, Traced]:
        """The program for batches of `rows` samples, cut by its tags and by `cuts`."""
        capture = self.captured(rows)
        if (rows, cuts) not in self._traced:
            cut_at = cuts.stages
            if cut_at is not None and self.like is not None:
                there = self.like.captured(self.like.batch_size)
                here = self.captured(self.batch_size)
                rename(here, there)
                cut_at = cut_at.moved(there.graph, here.graph)
            if cut_at is not None and rows != self.batch_size:
                cut_at = cut_at.moved(self.captured(self.batch_size).graph, capture.graph)
            traced = cut_program(
                capture,
                stages=self.stages,
                cut_at=cut_at,
                pieces=dict(cuts.pieces),
                counts=cuts.counts,
                calls=cuts.calls,
                layers=cuts.layers,
            )
            for each in cuts.tensors:
                traced = self._tensor_cuts.cut(traced, each)
            self._traced[rows, cuts] = traced
        return capture, self._traced[rows, cuts]

    def graph(self, cuts: Cuts = UNCUT, *, like: Traced | None = None) -> Graph:
        """The logical graph before any directive. Which dims carry rows is seen by comparison with the
        program at another size: `like`, or one of twice the batch; where neither is there, it is
        `guessed`."""
        _, traced = self.at(self.batch_size, cuts)
        types = _types(like) if like else None
        if types is None and not cuts.tensors:
            types = self._captures.types_at(2 * self.batch_size)
        types = types or self._larger(traced, cuts)
        self.guessed = types is None
        return build_graph(traced, batch_layouts(traced, types), cuts.sizes)

    def _larger(self, traced: Traced, cuts: Cuts) -> dict[str, TensorType] | None:
        """The types of Values at twice the size, if it is the same program there."""
        try:
            _, larger = self.at(2 * self.batch_size, cuts)
        except TraceError:
            return None
        if _structure(larger) != _structure(traced):
            return None
        return _types(larger)

    def local(self, rows: int, cuts: Cuts = UNCUT) -> Traced:
        """The same program at the size of one rank's microbatch; its structure must be the same."""
        whole, traced = self.at(self.batch_size, cuts)
        try:
            part, local = self.at(rows, cuts)
        except TraceError as error:
            raise TraceError(
                f"with {rows} samples, one rank's microbatch: {error.message}",
                details=error.details,
                legal=f"code that takes any batch size; the example batch has {self.batch_size}",
            ) from error
        if _structure(traced) != _structure(local):
            raise TraceError(
                f"the model's structure depends on the batch size: it differs between "
                f"{self.batch_size} and {rows} samples",
                details=[f"first difference at {first_difference(whole, part)}"],
                legal="code whose branches do not read the batch's shape",
            )
        return local

    def grouping(self, optimizer: Optimizer | Factory) -> tuple[Grouping, frozenset[str]]:
        """What an optimizer makes of the model's parameters; and those it leaves out, though a gradient
        reaches them."""
        whole, traced = self.at(self.batch_size)
        params = {plain_name(name): param for name, param in whole.model.named_parameters()}
        trained = {n for n, v in traced.values.items() if v.role == "param" and v.gradient}
        grouping = resolve_optimizer(optimizer, whole.model, params, trained=trained)
        return grouping, frozenset(trained - grouping.of.keys())

    @property
    def model(self) -> nn.Module:
        """The model as it was traced: without any element."""
        return self.captured(self.batch_size).model

    @cached_property
    def state_names(self) -> dict[str, str]:
        """What the model's state_dict has, in its order, and the tensor that each is."""
        named = (*self.model.named_buffers(), *self.model.named_parameters())
        tensors = {id(tensor): plain_name(name) for name, tensor in named}
        own = self.model.state_dict(keep_vars=True).items()
        return {name: tensors[id(tensor)] for name, tensor in own if id(tensor) in tensors}

    @cached_property
    def tensors(self) -> dict[str, ModelTensor]:
        """All parameters and buffers of the model, also those that no step reads, with their
        initializers: in the model's order, so that a copy takes the randomness of its original."""
        capture, traced = self.at(self.batch_size)
        buffers = {plain_name(name) for name, _ in capture.model.named_buffers()}
        tensors = {}
        for name, code in capture.initializers.bodies(capture.made).items():
            init = self.bodies.add(code.graph, code.constants)
            spec = (
                traced.values[name].spec if name in traced.values else spec_of(capture.made[name])
            )
            tensors[name] = ModelTensor(
                spec, init, code.keys, buffer=name in buffers, changes=name in traced.changed
            )
        return tensors


def _samples(shapes: Shapes) -> Shapes:
    """The shapes of one sample."""
    return tuple((name, shape[1:]) for name, shape in shapes)


def _batch_size(leaves: dict[str, Tensor]) -> int:
    if not leaves:
        raise TraceError("the example batch has no tensors")
    sizes = {}
    for name, leaf in leaves.items():
        if leaf.dim() == 0:
            raise TraceError(
                f"{users_name(name)} has no batch dimension",
                legal="tensors with samples in dim 0; what all samples share as a number, or a buffer",
            )
        sizes[name] = leaf.shape[0]
    if len(set(sizes.values())) > 1:
        raise TraceError(
            "the tensors of the batch differ in their number of samples",
            details=[f"{users_name(name)}: {size}" for name, size in sizes.items()],
            legal="samples in dim 0 of every tensor; what all samples share as a buffer of the model",
        )
    return next(iter(sizes.values()))


def _types(traced: Traced) -> dict[str, TensorType]:
    return {name: value.spec for name, value in traced.values.items()}


def _structure(traced: Traced) -> list[Any]:
    return [(c.tags, c.part, c.parts, c.inputs, c.outputs) for c in traced.chunks]
