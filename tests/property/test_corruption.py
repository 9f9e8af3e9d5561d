"""Nothing in a graph is stored in vain: whatever is corrupted, the plan changes or it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import msgspec
import pytest

from piper.compiler import driver
from piper.compiler.driver import Scheduled, Settings
from piper.errors import PiperError
from piper.ir.graph import Graph
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, STACKED, Layout, Routed, Split
from piper.ir.tensor_type import TensorType
from piper.ir.values import Value
from piper.plan.types import Optimizer
from piper.strategies import parallel
from tests.zoo import program_of

LAYOUTS: list[Layout] = [
    REPLICATED, PARTIAL, SHARED, STACKED, Split(0), Split(1), Routed("%x"),
]  # fmt: skip
STRATEGIES = {
    "zero0": {"pp": 2, "dp": 4, "ep": 2, "microbatches": 2},
    "zero3": {"pp": 2, "dp": 4, "ep": 2, "microbatches": 2, "zero": 3, "schedule": "zb_h1"},
}
SETTINGS = Settings(Optimizer("SGD", {"lr": 0.1}), "cpu", 0, 1.0, False, "", None)
pytestmark = pytest.mark.xdist_group("tied")


@cache
def scheduled(strategy: str) -> tuple[Scheduled, str]:
    program = program_of("tied").apply(parallel(**STRATEGIES[strategy]))  # type: ignore[arg-type]
    made = Scheduled(program.source, program.graph, tuple(program.history), program.stages)
    return made, driver.lower(made, SETTINGS).plan.content_hash()


def changes(value: Value) -> Iterator[Value]:
    """The Value with one layout, its layout along the batch, or its type changed."""
    for index, (axis, old) in enumerate(value.layout):
        for new in LAYOUTS:
            if new != old:
                pairs = list(value.layout)
                pairs[index] = (axis, new)
                yield msgspec.structs.replace(value, layout=tuple(pairs))
        left = tuple(pair for pair in value.layout if pair[0] != axis)
        yield msgspec.structs.replace(value, layout=left)
    for new in LAYOUTS:
        if new != value.batch:
            yield msgspec.structs.replace(value, batch=new)
    shape, dtype = value.shape, value.dtype
    types = [TensorType((*shape, 2), dtype), TensorType(shape, "float16")]
    types += [TensorType((*shape[:i], n + 1, *shape[i + 1 :]), dtype) for i, n in enumerate(shape)]
    yield from (msgspec.structs.replace(value, type=new) for new in types)


def unnoticed(strategy: str, graph: Graph) -> bool:
    before, known = scheduled(strategy)
    try:
        plan = driver.lower(replace(before, graph=graph), SETTINGS).plan
    except PiperError:
        return False
    return plan.content_hash() == known


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values(strategy: str) -> None:
    graph = scheduled(strategy)[0].graph
    for name, value in graph.values.items():
        for changed in changes(value):
            assert not unnoticed(strategy, graph.replacing({}, {name: changed})), (value, changed)
