"""frame: mesh, slices, groups, buckets, tensors and slots are possible ones; all proofs rely on it.

A plan may come from a file. Nothing here takes time or memory that depends on a number in the plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations

from piper.check.problem import Problem
from piper.directives.recompute import Recompute
from piper.directives.split import Split
from piper.ir.communication import MOST_LEFT
from piper.ir.layouts import REPLICATED, STACKED, divides, layouts_text, local, local_shape
from piper.ir.precisions import dtypes_problem, precision_problem
from piper.ir.tensor_type import MAX_BYTES, TensorType
from piper.mesh import Mesh, Slice, mesh_problem
from piper.plan.keys import num_indexes
from piper.plan.memory_ledger import planned_load
from piper.plan.optimizers import KNOWN
from piper.plan.slots import BUCKETED, COORDINATE, Slot
from piper.plan.tasks import Calling, Run
from piper.plan.types import Bucket, ModelTensor, Plan, RankClass

MAX_MICROBATCHES = 1 << 20
_MAX_UNEQUAL = 1000  # classes whose slices fix different axes
_DEVICES = ("cpu", "cuda")
_BODY = re.compile(r"[0-9a-f]{16}")


def frame(plan: Plan) -> Iterator[Problem]:
    """Numbers that no plan can have, and names of what does not exist."""
    head = list(_head(plan))
    for why in head or (*_classes(plan), *_tensors(plan), *_groups(plan)):
        yield Problem("structure", why)
    if head:
        return
    for bucket in plan.buckets:
        yield from _named(f"bucket {bucket.name}", _bucket(plan, bucket))
    for part in plan.classes:
        yield from _named(f"class {part.slice}", (*_indexes(part), *_room(plan, part)))
        for slot in part.slots:
            wrong = [*_slot(plan, slot)]
            if wrong:
                yield from _named(f"{part.slice}: slot {slot.name}", wrong)


def _named(what: str, reasons: Iterable[str]) -> Iterator[Problem]:
    for why in reasons:
        yield Problem("structure", f"{what} {why}")


def _head(plan: Plan) -> Iterator[str]:
    problem = mesh_problem(plan.mesh)
    if problem:
        yield problem
        return
    if not _axes(plan.mesh, plan.data_axes):
        yield f"the data axes are {', '.join(plan.data_axes)}, the mesh is {plan.mesh}"
    if not 1 <= plan.num_microbatches <= MAX_MICROBATCHES:
        yield f"there are {plan.num_microbatches} microbatches, of 1 to {MAX_MICROBATCHES}"
    if plan.device not in _DEVICES:
        yield f"no device is called {plan.device!r}"
    for group in plan.param_groups:
        if group.optimizer not in KNOWN:
            yield f"no optimizer is called {group.optimizer!r}"
        for option, value in group.options.items():
            numbers = value if isinstance(value, list | tuple) else [value or 0]
            if not all(isinstance(number, int | float | str) for number in numbers):
                yield f"the optimizer's {option} is no number"
    if len({stream.name for stream in plan.streams}) < len(plan.streams):
        yield "two streams have one name"
    if plan.clip is not None and not 0 < plan.clip < math.inf:
        yield f"gradients are clipped to {plan.clip}"
    problem = precision_problem(plan.precision)
    if problem:
        yield f"the precision: {problem}"
    if plan.ema is not None and not 0 <= plan.ema < 1:
        yield f"moving averages keep {plan.ema}"
    yield from _cadences(plan)
    if not 1 <= planned_load(plan) < math.inf:
        yield f"memory is planned for {planned_load(plan)} times an even share of rows"
    if len(set(plan.bodies)) < len(plan.bodies) or not all(map(_BODY.fullmatch, plan.bodies)):
        yield "two bodies have one name, or one has no hash for a name"
    yield from _insides(plan)
    yield from _products(plan)


def _insides(plan: Plan) -> Iterator[str]:
    """Bytes are possible ones, and places are those of arguments and results, each at most once."""
    if not set(plan.inside) <= set(plan.bodies):
        yield "a body that does not exist has bytes inside"
    most: dict[str, tuple[int, int]] = {}  # body -> arguments and results that it has at least
    for name, moments in plan.inside.items():
        if any(not 0 <= moment.own < MAX_BYTES for moment in moments):
            yield "a body has an impossible number of bytes inside"
        drops = [place for moment in moments for place in moment.drops]
        makes = [place for moment in moments for place in moment.makes]
        if any(
            min(places, default=0) < 0 or len(set(places)) < len(places)
            for places in (drops, makes)
        ):
            yield "a body makes or drops twice, or at no place, what it has inside"
        most[name] = max(drops, default=-1) + 1, max(makes, default=-1) + 1
    for part in plan.classes:
        for task in part.tasks:
            if isinstance(task, Calling) and task.body in most:
                inputs, outputs = most[task.body]
                if inputs > len(task.inputs) or outputs > len(task.outputs):
                    yield f"the body of {task.name} makes or drops more than it is called with"
                    return


def _products(plan: Plan) -> Iterator[str]:
    """Places are those of results, each once."""
    if not set(plan.products) <= set(plan.bodies):
        yield "a body that does not exist has products"
    for places in plan.products.values():
        if min(places, default=0) < 0 or len(set(places)) < len(places):
            yield "a body has a product twice, or at no place"
    for part in plan.classes:
        for task in part.tasks:
            places = plan.products.get(task.body, ()) if isinstance(task, Calling) else ()
            if max(places, default=-1) >= len(task.writes):
                yield f"the body of {task.name} has more products than results"
                return


def _cadences(plan: Plan) -> Iterator[str]:
    """They are about directives that leave something open, one for each."""
    seen: set[int] = set()
    for cadence in plan.cadences:
        exists = 0 <= cadence.origin < len(plan.history) and cadence.origin not in seen
        seen.add(cadence.origin)
        if not exists:
            yield f"a choice is made for directive {cadence.origin}, which is none or has one"
            continue
        directive = plan.history[cadence.origin].directive
        for field in ("reduce_every", "reuse"):
            number = getattr(cadence, field)
            if number is not None and (number < 0 or getattr(directive, field, 1) is not None):
                yield f"{field}={number} is chosen for {plan.history[cadence.origin]}"
        for bucket in cadence.kept:
            shared = 0 <= bucket < len(plan.buckets) and plan.buckets[bucket].over
            if cadence.reuse is None or not shared:
                yield f"bucket {bucket} is kept by {plan.history[cadence.origin]}"
        if cadence.under_way and not (cadence.under_way > 0 and isinstance(directive, Split)):
            number = cadence.under_way
            yield f"{number} microbatches under way are chosen for {plan.history[cadence.origin]}"
        if cadence.again and any(isinstance(r.directive, Recompute) for r in plan.history):
            yield "results are computed again by choice, but the user speaks of that"


def _axes(mesh: Mesh, axes: Sequence[str]) -> bool:
    """Whether these are different axes of the mesh."""
    return len(set(axes)) == len(axes) and set(axes) <= set(mesh.names)


def _room(plan: Plan, part: RankClass) -> Iterator[str]:
    """What bodies leave to communication is possible; a CPU has nothing to leave."""
    most = MOST_LEFT if plan.device == "cuda" else 0
    for task in part.tasks:
        if isinstance(task, Run) and not 0 <= task.leaves <= most:
            yield f"has {task.name}, which leaves {task.leaves} multiprocessors, of 0 to {most}"
            return


def _classes(plan: Plan) -> Iterator[str]:
    """Every rank is in one class."""
    slices = [part.slice for part in plan.classes]
    for at in slices:
        if not at.inside(plan.mesh):
            yield f"class {at} is outside of the mesh {plan.mesh}"
            return
    unequal = len({at.axes for at in slices}) > 1
    if unequal and len(slices) > _MAX_UNEQUAL:
        yield f"{len(slices)} classes fix different axes"
    elif len({frozenset(at.fixed) for at in slices}) < len(slices) or (
        unequal and any(_meet(one, other) for one, other in combinations(slices, 2))
    ):
        yield "two classes have ranks in common"
    elif sum(plan.mesh.size_of(plan.mesh.free(at)) for at in slices) != plan.mesh.size:
        yield "ranks of the mesh are in no class"


def _meet(one: Slice, other: Slice) -> bool:
    mine = dict(one.fixed)
    return all(mine.get(axis, index) == index for axis, index in other.fixed)


def _groups(plan: Plan) -> Iterator[str]:
    slices = {part.slice for part in plan.classes}
    for group in plan.groups:
        if not (_axes(plan.mesh, group.over) and set(group.slices) <= slices and group.slices):
            yield f"group {group} has axes or slices that do not exist"


def _tensors(plan: Plan) -> Iterator[str]:
    bodies = set(plan.bodies)
    for name, tensor in plan.tensors.items():
        if not _is_tensor(tensor.type):
            yield f"{name} is no tensor: {tensor.type}"
        if not _cuts(plan.mesh, tensor):
            yield f"{name} is {list(tensor.shape)}, which {layouts_text(tensor.cut)} cannot cut"
        if tensor.changes and not tensor.buffer:
            yield f"{name} is a parameter, which no forward changes"
        if tensor.init not in bodies:
            yield f"{name} is made by a body that does not exist"
    for name, leaf in plan.batch.items():
        if not _is_tensor(leaf):
            yield f"the batch's {name} is no tensor: {leaf}"
    for part in plan.classes:
        for task in part.tasks:
            if isinstance(task, Calling) and task.body not in bodies:
                yield f"{part.slice}: {task.name} runs a body that does not exist"


def _is_tensor(type: TensorType) -> bool:
    """Whether there can be such a tensor, of one size."""
    return type.possible and type.bound is None


def _bucket(plan: Plan, bucket: Bucket) -> Iterator[str]:
    slices = {part.slice for part in plan.classes}
    axes = (bucket.over, bucket.copies, bucket.same)
    alike = len(bucket.params) == len(bucket.shapes) == len(bucket.offsets)
    known = set(bucket.params) <= plan.tensors.keys() and set(bucket.slices) <= slices
    if not (all(_axes(plan.mesh, a) for a in axes) and known and alike and bucket.slices):
        yield "has axes, slices or parameters that do not exist"
    if not all(
        _is_tensor(TensorType(shape, bucket.dtype)) for shape in ((bucket.size,), *bucket.shapes)
    ):
        yield "is of no possible size"
    if any(plan.tensors[name].dtype != bucket.dtype for name in bucket.params if known):
        yield f"has parameters that are not {bucket.dtype}"
    yield from _dtypes(plan, bucket)
    if any(not 0 <= offset <= bucket.size for offset in bucket.offsets):
        yield "has parameters outside of it"
    if any(plan.tensors[name].buffer for name in bucket.params if known):
        yield "has buffers among its parameters"
    if bucket.param_groups and len(bucket.param_groups) != len(bucket.params):
        yield "has parameters in no parameter group"
    elif bucket.param_groups and not (bucket.trained and any(bucket.param_groups)):
        yield "names parameter groups, but is not trained or all are in the first"
    elif bucket.trained and not all(
        0 <= group < len(plan.param_groups) for group in bucket.param_groups or (0,)
    ):
        yield "has parameters in a parameter group that does not exist"


def _dtypes(plan: Plan, bucket: Bucket) -> Iterator[str]:
    """Masters, sums, the wire and state are as the plan's precision has them for its groups."""
    groups = dict(enumerate(plan.param_groups)) if bucket.trained else {}
    own = bucket.param_groups or (0,)
    names = {groups[number].names(number) if number in groups else () for number in own}
    if any(plan.precision.dtypes(bucket.dtype, each) != bucket.dtypes for each in names):
        yield f"has {', '.join(bucket.dtypes)}, which is not the plan's precision"
    problem = dtypes_problem(bucket.dtype, bucket.dtypes) if bucket.trained else ""
    if problem:
        yield problem


def _indexes(part: RankClass) -> Iterator[str]:
    if any(not 0 <= slot < len(part.slots) for slot in part.results.values()):
        yield "has a result in a slot that does not exist"
    if any(not 0 <= task < len(part.tasks) for group in part.overlaps for task in group):
        yield "overlaps a task that does not exist"


def _slot(plan: Plan, slot: Slot) -> Iterator[str]:
    if not slot.type.possible:
        yield f"is no tensor: {slot.dtype}{list(slot.shape)}, with a bound of {slot.bound}"
    if min(slot.base, slot.bucket, slot.pool) < -1 or slot.offset < 0:
        yield "has a negative number"
    if slot.bucket >= len(plan.buckets) or (slot.kind in BUCKETED and slot.bucket < 0):
        yield "belongs to a bucket that does not exist"
    if slot.kind in ("param", "buffer"):
        yield from _of_the_model(plan, slot)
    if slot.kind == "batch":
        parts = plan.num_data_ranks * plan.num_microbatches
        yield from _rows(slot, plan.batch.get(slot.source), parts)
    if slot.kind == "constant" and not _is_number(slot.source):
        yield f"holds {slot.source!r}, which is no number"
    if slot.kind == "coordinate" and not _is_place(plan, slot):
        yield f"holds the rank's place along {slot.source!r}, in the mesh {plan.mesh}"
    if slot.kind == "key" and slot.shape != (num_indexes(slot.source),):
        yield f"holds the keys {slot.source!r}"


def _is_place(plan: Plan, slot: Slot) -> bool:
    """Along its own axis each rank has another one, and along others the same."""
    own = all(way == (STACKED if axis == slot.source else REPLICATED) for axis, way in slot.cut)
    known = slot.source in plan.mesh.names and slot.source in dict(slot.cut)
    return known and own and slot.type == COORDINATE


def _of_the_model(plan: Plan, slot: Slot) -> Iterator[str]:
    """A slot holds the rank's part of a tensor; parts are of one shape on all ranks."""
    whole = plan.tensors.get(slot.source)
    if whole is None:
        yield f"holds {slot.source!r}, which is no tensor of the model"
    elif whole.buffer != (slot.kind == "buffer"):
        yield f"holds {slot.source} as a {slot.kind}, which it is not"
    elif _cuts(plan.mesh, whole):
        shape = local(whole.type, whole.cut, plan.mesh).shape
        if (slot.shape, slot.dtype) != (shape, whole.dtype):
            yield (
                f"is {slot.dtype}{list(slot.shape)}, but a rank has {whole.dtype}{list(shape)} "
                f"of {slot.source}"
            )


def _cuts(mesh: Mesh, tensor: ModelTensor) -> bool:
    """Whether axes cut a tensor along dims that it has, into equal parts of every block."""
    sizes, left = dict(mesh.axes), tensor.shape
    for axis, split in tensor.cut:
        if axis not in sizes or not divides(split, left, sizes[axis]):
            return False
        left = local_shape(left, split, sizes[axis])
    return len({axis for axis, _ in tensor.cut}) == len(tensor.cut)


def _rows(slot: Slot, whole: TensorType | None, parts: int) -> Iterator[str]:
    """A slot holds one of equal parts of a leaf, cut along its dim 0."""
    if whole is None:
        yield f"holds {slot.source!r}, which is no tensor of the batch"
        return
    shape = whole.shape
    if parts > 1 and shape:
        shape = (shape[0] // parts, *shape[1:]) if shape[0] % parts == 0 else ()
    if (slot.shape, slot.dtype) != (shape, whole.dtype):
        yield (
            f"is {slot.dtype}{list(slot.shape)}, one of {parts} parts of "
            f"{whole.dtype}{list(whole.shape)}"
        )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
