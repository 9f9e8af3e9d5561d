"""What bodies drop at its last use, and the memory that is planned for that."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from piper.bodies.cutting.body_memory import moments_inside
from piper.bodies.files.codec import encode, load
from piper.ir.tensor_type import TensorType
from piper.plan.body_moments import Moment, Moments, larger, peak_moment, shortened
from piper.plan.handed_over import handed_over
from piper.plan.slots import Slot
from piper.plan.tasks import Comm, Run, Task

KB = TensorType((256,), "float32")


def _two_products() -> fx.Graph:
    """Of the first argument with the second, and of that with the third; all are 2 x 2."""
    graph = fx.Graph()
    a, b, c = (graph.placeholder(name) for name in "abc")
    first = graph.call_function(torch.ops.aten.mm.default, (a, b))
    turned = graph.call_function(torch.ops.aten.t.default, (c,))
    second = graph.call_function(torch.ops.aten.mm.default, (first, turned))
    graph.output((second,))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(2, 2, device="meta")
    turned.meta["val"] = c.meta["val"].t()
    return graph


def test_a_body_drops_its_arguments_at_their_last_use() -> None:
    alive: list[list[bool]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            alive.append([not argument.expired() for argument in known])
            return func(*args, **(kwargs or {}))

    function, given = load(encode(_two_products())), [torch.ones(2, 2) for _ in range(3)]
    known = [StorageWeakRef(tensor.untyped_storage()) for tensor in given]
    with Seen():
        function(given)
    assert given == [] and all(argument.expired() for argument in known)
    assert alive == [[True, True, True], [False, False, True], [False, False, True]]


def test_moments_of_a_body() -> None:
    moments = moments_inside(_two_products())
    assert [m for m in moments if m.makes or m.drops] == [
        Moment(16, (), (0, 1)),
        Moment(16, (0,), (2,)),
    ]
    assert shortened(moments) == (Moment(16, (), (0, 1)), Moment(16, (0,)))


def _most(moments: Moments, freed: list[int], filled: list[int]) -> int:
    """The peak, by its definition."""
    found = []
    for number, moment in enumerate(moments):
        later = {place for m in moments[number + 1 :] for place in m.makes}
        gone = {place for m in moments[:number] for place in m.drops}
        made = sum(size for place, size in enumerate(filled) if place not in later)
        found.append(moment.own + made + sum(s for p, s in enumerate(freed) if p not in gone))
    return max(found)


@pytest.mark.parametrize("seed", range(50))
def test_short_moments_have_the_same_peak(seed: int) -> None:
    random = Random(seed)
    places = [(kind, place) for kind in ("makes", "drops") for place in range(6)]
    moments = []
    while places:
        chosen = [
            places.pop(random.randrange(len(places))) for _ in range(random.randint(0, 2)) if places
        ]
        moments.append(
            Moment(
                random.randint(0, 20),
                tuple(place for kind, place in chosen if kind == "makes"),
                tuple(place for kind, place in chosen if kind == "drops"),
            )
        )
    whole, short = tuple(moments), shortened(tuple(moments))
    assert len(short) <= len(whole)
    for _ in range(20):
        freed, filled = ([random.choice([0, 0, 3, 9, 30]) for _ in range(6)] for _ in "io")
        most = _most(whole, freed, filled)
        assert most == _most(short or (Moment(0),), freed, filled)
        peak = peak_moment(whole, freed, filled)
        gone = [place for moment in whole[:peak] for place in moment.drops]
        later = [place for moment in whole[peak + 1 :] for place in moment.makes]
        alive = (
            sum(freed) + sum(filled) - sum(freed[p] for p in gone) - sum(filled[p] for p in later)
        )
        assert whole[peak].own + alive == most


def test_equal_code_with_other_sizes_counts_the_larger() -> None:
    one, other = (Moment(3, (), (0,)), Moment(5)), (Moment(4, (), (0,)), Moment(1))
    assert larger(one, other) == (Moment(4, (), (0,)), Moment(5))
    assert larger(one, (Moment(7),)) == (Moment(7),)


def _handed(*tasks: Task, slots: tuple[Slot, ...] = (Slot("x", "temp", KB),)) -> frozenset[int]:
    return handed_over(tasks, slots)


def _run(stream: int = 0, *, inputs: tuple[int, ...] = (), outputs: tuple[int, ...] = ()) -> Run:
    return Run(name="run", stream=stream, body="", inputs=inputs, outputs=outputs, frees=inputs)


def test_what_bodies_are_handed() -> None:
    made, read = _run(outputs=(0,)), _run(inputs=(0,))
    assert _handed(made, read) == {0}
    assert not _handed(made, _run(inputs=(0, 0)))  # two arguments hold it
    assert not _handed(made, _run(1, inputs=(0,)))  # its memory belongs to another stream
    assert not _handed(read)  # it was there before the step
    send = Comm(name="send", stream=1, group=0, comm="send", source=0)
    assert not _handed(made, send, read)
    assert not _handed(Comm(name="recv", stream=0, group=0, comm="recv", target=0), read)
    for slot in (Slot("x", "temp", KB, pool=0), Slot("x", "grad", KB)):
        assert not _handed(made, read, slots=(slot,))
    shown = (Slot("x", "gathered", KB), Slot("w", "param", KB, base=0))
    assert not _handed(made, read, slots=shown)
