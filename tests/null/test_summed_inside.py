"""Products that bodies add to sums where they arise: which, and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import pytest
import torch
from torch import fx

from piper.bodies.files.codec import encode, load
from piper.bodies.products import products_of
from piper.errors import PlanError
from piper.ir.tensor_type import TensorType
from piper.plan.local_order import Local
from piper.plan.slots import Slot
from piper.plan.summed_inside import Part, summed_inside
from piper.plan.tasks import Add, Norm, Run, Task

_aten = torch.ops.aten
KB = TensorType((16, 16), "float32")
FLAT = TensorType((256,), "float32")
NARROW = TensorType((256,), "bfloat16")


def _backward() -> fx.Graph:
    """Gradients of (0) a weight, (1) its bias, (2) an activation that another result shows."""
    graph = fx.Graph()
    grad, x, weight = (graph.placeholder(name) for name in ("grad", "x", "weight"))
    turned = graph.call_function(_aten.t.default, (grad,))
    product = graph.call_function(_aten.mm.default, (turned, x))
    back = graph.call_function(_aten.t.default, (graph.call_function(_aten.t.default, (product,)),))
    bias = graph.call_function(_aten.sum.dim_IntList, (grad, [0]))
    passed = graph.call_function(_aten.mm.default, (grad, weight))
    doubled = graph.call_function(_aten.add.Tensor, (passed, passed))
    graph.output((back, bias, passed, doubled))
    return graph


def test_which_results_are_products() -> None:
    assert products_of(_backward()) == (0,)


def test_a_product_that_is_given_twice_is_none() -> None:
    graph = _backward()
    [end] = graph.find_nodes(op="output")
    end.args = ((end.args[0][0], end.args[0][0]),)  # type: ignore[index]
    assert products_of(graph) == ()


@pytest.mark.parametrize("starts", [True, False])
def test_a_body_adds_to_its_sum(starts: bool) -> None:
    text = encode(_backward())
    grad, x, weight = (torch.randn(4, 4, dtype=torch.float64) for _ in range(3))
    plain = load(text)([grad, x, weight])
    total = torch.full((4, 4), float("nan") if starts else 3.0, dtype=torch.float64)
    added = load(text, ((0, starts),))([grad, x, weight, total])
    assert added[0] is None
    torch.testing.assert_close(list(added[1:]), list(plain[1:]), rtol=0, atol=0)
    torch.testing.assert_close(total, plain[0] + (0 if starts else 3))


def test_what_is_no_product_is_refused() -> None:
    with pytest.raises(PlanError, match="result 1 of a body is no product"):
        load(encode(_backward()), ((1, False),))


RUN = Run(name="B", stream=0, body="b", outputs=(0,))
ADD = Add(name="add", stream=0, terms=(0,), sums=(1,), first=(False,), offsets=(0,), frees=(0,))
TERM = Slot("term", "temp", TensorType((16, 16), "bfloat16"))
TOTAL = Slot("sum", "grad", FLAT, bucket=0)


@dataclass(frozen=True)
class Case:
    """A body that makes a gradient, an Add to a sum, and what may stand between or beside them."""

    run: Run = RUN
    add: Add = ADD
    before: tuple[Task, ...] = ()
    between: tuple[Task, ...] = ()
    after: tuple[Task, ...] = ()
    term: Slot = TERM
    total: Slot = TOTAL
    device: str = "cuda"

    def summed(self) -> dict[int, Part]:
        tasks = (*self.before, self.run, *self.between, self.add, *self.after)
        slots = (self.term, self.total, Slot("squares", "temp", KB))
        return summed_inside(Local(tasks, slots), {"b": (0,)}, self.device)


CASE = Case()
READS = Norm(name="norm", stream=0, gradient=1, squares=2, weight=1.0)
ELSEWHERE = msgspec.structs.replace(READS, stream=1)


def test_a_gradient_is_added_inside() -> None:
    assert CASE.summed() == {0: Part(1, 0, False)}
    started = replace(CASE, add=msgspec.structs.replace(ADD, first=(True,)))
    assert started.summed() == {0: Part(1, 0, True)}
    assert replace(CASE, before=(READS,), after=(READS,)).summed()
    waiting = msgspec.structs.replace(RUN, waits=(0,))
    assert replace(CASE, before=(ELSEWHERE,), run=waiting).summed()
    assert replace(CASE, total=Slot("sum", "grad", NARROW, bucket=0)).summed()


@pytest.mark.parametrize(
    "case",
    {
        "another reads the sum in between": replace(CASE, between=(READS,)),
        "another stream may still read the sum": replace(
            CASE,
            before=(ELSEWHERE,),
            between=(msgspec.structs.replace(READS, gradient=2, waits=(0,)),),
        ),
        "another task reads the gradient": replace(
            CASE, after=(msgspec.structs.replace(READS, gradient=0),)
        ),
        "the sum is on another stream": replace(
            CASE, add=msgspec.structs.replace(ADD, stream=1, waits=(0,))
        ),
        "the gradient stays": replace(CASE, add=msgspec.structs.replace(ADD, frees=())),
        "the Add makes the sum": replace(
            CASE,
            total=Slot("sum", "sum", FLAT, bucket=0),
            add=msgspec.structs.replace(ADD, first=(True,), zeros=True),
        ),
        "the Add clears what no gradient covers": replace(
            CASE, add=msgspec.structs.replace(ADD, first=(True,), zeros=True)
        ),
        "two gradients for one place": replace(
            CASE,
            add=msgspec.structs.replace(ADD, terms=(0, 2), first=(False, False), offsets=(0, 0)),
        ),
        "it is no product": replace(CASE, run=msgspec.structs.replace(RUN, body="c")),
        "a CPU adds with the bits of an addition": replace(CASE, device="cpu"),
        "float32 products have the bits of an addition": replace(
            CASE, term=Slot("term", "temp", KB)
        ),
        "no kernel adds to a wider sum": replace(
            CASE, total=Slot("sum", "grad", TensorType((256,), "float64"), bucket=0)
        ),
    }.items(),
    ids=lambda case: case[0],
)
def test_a_gradient_stays_outside(case: tuple[str, Case]) -> None:
    assert case[1].summed() == {}
