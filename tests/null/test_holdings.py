"""Holdings: every element of the model lies somewhere, once in each memory, whatever cuts it."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import msgspec
import pytest

from piper.check import problems
from piper.ir.layouts import Split, block_sizes, layouts_text, local
from piper.ir.tensor_type import TensorType
from piper.mesh import Mesh, Slice
from piper.plan.holdings import Holding, holdings
from piper.plan.slots import Slot
from piper.plan.tasks import Update
from piper.plan.tensor_parts import Part, part_of
from piper.plan.types import Bucket, ModelTensor, ParamGroup, Plan, RankClass
from tests.plans import NAMES, plan_of

pytestmark = pytest.mark.xdist_group("mutants")
Elements = set[tuple[int, ...]]


def _elements(held: Holding) -> list[tuple[int, ...]]:
    """The places in the whole tensor of what is held, by brute force."""
    dims = [[at for a, n in spans for at in range(a, a + n)] for spans in held.part.spans]
    return list(itertools.product(*dims))[held.first : held.last]


def _counts(plan: Plan, what: str) -> dict[str, Counter[tuple[int, ...]]]:
    """Per tensor, how many ranks hold each element."""
    found: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for rank in range(plan.mesh.size):
        for held in holdings(plan, rank):
            if held.what == what and not held.state:
                found[held.tensor].update(_elements(held))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_every_element_is_held_equally_often(name: str) -> None:
    plan = plan_of(name)
    trained = {p for bucket in plan.buckets if bucket.trained for p in bucket.params}
    for what in ("param", "grad", "master"):
        counts = _counts(plan, what)
        params = {name for name, tensor in plan.tensors.items() if not tensor.buffer}
        assert counts.keys() == (params if what == "param" else trained)
        for tensor, found in counts.items():
            assert len(found) == math.prod(plan.tensors[tensor].shape), "some are nowhere"
            assert len(set(found.values())) == 1, "some have more copies"
    for bucket in plan.buckets:
        copies = len(bucket.slices) * plan.mesh.size_of(bucket.copies)
        for param in bucket.params:
            assert set(_counts(plan, "master")[param].values()) == {copies}


@pytest.mark.parametrize("name", NAMES)
def test_nothing_lies_over_something_else(name: str) -> None:
    plan = plan_of(name)
    for rank in range(0, plan.mesh.size, 3):
        used: dict[tuple[int, str, str], list[range]] = defaultdict(list)
        for held in holdings(plan, rank):
            mine = range(held.offset, held.offset + held.last - held.first)
            assert 0 < len(mine) <= held.part.num_elements
            used[held.slot, held.what, held.state].append(mine)
        for places in used.values():
            for one, other in itertools.combinations(places, 2):
                assert one.stop <= other.start or other.stop <= one.start


MESH = Mesh((("ep", 2), ("tp", 3), ("dp", 2)))


CUTS = (
    (),
    (("ep", Split(0)),),
    (("tp", Split(1)),),
    (("ep", Split(0)), ("tp", Split(1))),
    (("ep", Split(1)), ("tp", Split(1))),
    (("ep", Split(0, 2)), ("tp", Split(1, 4))),
    (("ep", Split(2)), ("tp", Split(1, (3, 6, 3)))),
    (("ep", Split(1, (2, 10))), ("tp", Split(1))),
    (("tp", Split(1, 2)), ("ep", Split(1, (2, 2)))),
)


@pytest.mark.parametrize("cut", CUTS, ids=layouts_text)
def test_parts_of_any_dims_and_several_axes(cut: tuple[tuple[str, Split], ...]) -> None:
    tensor = ModelTensor(TensorType((4, 12, 2), "float32"), "", (), cut=cut)
    parts = {part_of(tensor, MESH, MESH.coordinates(rank)) for rank in range(MESH.size)}
    assert len(parts) == MESH.size_of(tuple(axis for axis, _ in cut))
    assert {part.size for part in parts} == {local(tensor.type, cut, MESH).shape}
    seen = Counter(e for part in parts for e in _elements(_all_of(part)))
    assert set(seen.values()) == {1} and len(seen) == 4 * 12 * 2
    assert not any(one.meets(other) for one, other in itertools.combinations(parts, 2))
    for rank in range(MESH.size):
        at = MESH.coordinates(rank)
        assert part_of(tensor, MESH, at).spans == tuple(_spans(tensor, dim, at) for dim in range(3))


def _spans(tensor: ModelTensor, dim: int, at: dict[str, int]) -> tuple[tuple[int, int], ...]:
    """A rank's positions along a dim, block by block, and those that follow each other as one."""
    left = list(range(tensor.shape[dim]))
    for axis, split in tensor.cut:
        if split.dim == dim:
            edges = list(itertools.accumulate(block_sizes(split, len(left)), initial=0))
            parts = MESH.size_of((axis,))
            left = [
                position
                for begin, end in itertools.pairwise(edges)
                for position in left[begin:end][
                    at[axis] * (end - begin) // parts : (at[axis] + 1) * (end - begin) // parts
                ]
            ]
    runs: list[list[int]] = []
    for position in left:
        if runs and runs[-1][-1] + 1 == position:
            runs[-1].append(position)
        else:
            runs.append([position])
    return tuple((run[0], len(run)) for run in runs)


def _all_of(part: Part) -> Holding:
    return Holding("param", "x", 0, 0, part, 0, part.num_elements)


@pytest.mark.parametrize(
    ("rows", "columns"), [(Split(0), Split(1)), (Split(0, 2), Split(1, 2))], ids=str
)
def test_a_flat_shard_that_cuts_parts_in_the_middle(rows: Split, columns: Split) -> None:
    """Two parameters, cut along other dims by ep and tp, in one bucket whose shards are over dp."""
    cuts = (("ep", Split(0)), ("tp", columns)), (("tp", rows), ("ep", Split(1)))
    tensors = {
        "a": ModelTensor(TensorType((4, 6), "float32"), "", (), cut=cuts[0]),
        "b": ModelTensor(TensorType((6, 2), "float32"), "", (), cut=cuts[1]),
    }
    bucket = Bucket(
        name="b0",
        params=("a", "b"),
        shapes=((2, 2), (2, 1)),
        offsets=(0, 4),
        size=6,
        dtype="float32",
        master="float32",
        sums="float32",
        wire="float32",
        state="float32",
        slices=(Slice(()),),
        over=("dp",),
    )
    slots = (
        Slot("$shard", "shard", TensorType((3,), "float32"), bucket=0),
        Slot("$grad", "grad", TensorType((3,), "float32"), bucket=0),
    )
    update = Update(name="u", stream=0, bucket=0, gradient=1, stepped=(0,), count=1.0)
    plan: Plan = Plan(
        mesh=MESH,
        streams=(),
        groups=(),
        classes=(RankClass(Slice(()), slots, (update,), {}),),
        tensors=tensors,
        batch={},
        batch_constants={},
        data_axes=("dp",),
        num_microbatches=1,
        param_groups=(ParamGroup("AdamW"),),
        seed=0,
        device="cpu",
        bodies=(),
        buckets=(bucket,),
    )
    first = [held for held in holdings(plan, 0) if held.what == "param"]
    assert [(held.key, held.offset) for held in first] == [("a[0:3]", 0)]
    second = [held for held in holdings(plan, 1) if held.what == "param"]
    assert [(held.key, held.offset) for held in second] == [("a[3:4]", 0), ("b", 1)]
    states = {(held.state, held.form) for held in holdings(plan, 1) if held.what == "state"}
    assert states == {("exp_avg", "elements"), ("exp_avg_sq", "elements"), ("step", "number")}
    for what in ("param", "grad", "master"):
        counts = _counts(plan, what)
        for name, tensor in tensors.items():
            assert len(counts[name]) == math.prod(tensor.shape)
            assert set(counts[name].values()) == {1}
    # A cut that does not divide is refused before anybody asks.
    for cut in (
        Split(0),
        Split(),
        Split(2),
        Split(1, 4),
        Split(1, 0),
        Split(1, (3, 4)),
        Split(1, ()),
    ):
        impossible = msgspec.structs.replace(tensors["a"], cut=(("tp", cut),))
        wrong = msgspec.structs.replace(plan, tensors={**tensors, "a": impossible})
        assert any("cannot cut" in found.message for found in problems(wrong))
