"""Properties of the compiler's parts, on random inputs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from piper.frontend.cut.chunks import cut
from piper.mesh import Group, Mesh, Slice
from piper.passes.dispatch.waits import waits_of


@st.composite
def dags(draw: st.DrawFn) -> tuple[list[fx.Node], dict[fx.Node, tuple[tuple[str, int], ...]]]:
    """Nodes in topological order, each in one of a few regions."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    regions = {}
    for _ in range(draw(st.integers(1, 24))):
        inputs = draw(st.lists(st.sampled_from(nodes), max_size=3)) if nodes else []
        node = graph.call_function(max, tuple(inputs))
        regions[node] = (("PP", draw(st.integers(0, 3))),)
        nodes.append(node)
    return nodes, regions


@given(dags())
def test_chunks_form_a_dag_and_are_maximal(
    case: tuple[list[fx.Node], dict[fx.Node, tuple[tuple[str, int], ...]]],
) -> None:
    nodes, regions = case
    chunk = cut(nodes, regions, lambda node: node.all_input_nodes)
    assert set(chunk) == set(nodes)
    for node in nodes:
        for arg in node.all_input_nodes:
            # Numbers ascend along edges between chunks, so that no chunk waits for itself.
            assert chunk[arg] <= chunk[node]
            assert chunk[arg] != chunk[node] or regions[arg] == regions[node]
    by_chunk = {c: {regions[n] for n in nodes if chunk[n] == c} for c in chunk.values()}
    assert all(len(found) == 1 for found in by_chunk.values())
    # Maximal: no two chunks of a region could be one without a cycle.
    region_of = {chunk[n]: regions[n] for n in nodes}
    following = _following(nodes, chunk)
    for one, other in itertools.combinations(sorted(region_of), 2):
        if region_of[one] == region_of[other]:
            around = [c for c in following[one] if c != other]
            assert any(other in _reachable(following, c) for c in around)


def _following(nodes: list[fx.Node], chunk: dict[fx.Node, int]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {c: set() for c in chunk.values()}
    for node in nodes:
        for arg in node.all_input_nodes:
            if chunk[arg] != chunk[node]:
                found[chunk[arg]].add(chunk[node])
    return found


def _reachable(following: dict[int, set[int]], start: int) -> set[int]:
    seen, stack = {start}, [start]
    while stack:
        for target in following[stack.pop()] - seen:
            seen.add(target)
            stack.append(target)
    return seen


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.data(),
)
def test_waits_order_every_dependency(streams: list[int], data: st.DataObject) -> None:
    after = [
        set(data.draw(st.lists(st.integers(0, i - 1), max_size=4))) if i else set()
        for i in range(len(streams))
    ]
    waits = waits_of(streams, after)
    before: list[set[int]] = []  # what is surely complete when a task starts
    for index, stream in enumerate(streams):
        known = set()
        earlier = [i for i in range(index) if streams[i] == stream]
        for other in (*earlier, *waits[index]):
            known |= before[other] | {other}
        before.append(known)
        assert after[index] <= known
        assert all(streams[other] != stream for other in waits[index])
        for other in waits[index]:  # none of them is implied by the rest
            rest = set()
            for kept in (*earlier, *(w for w in waits[index] if w != other)):
                rest |= before[kept] | {kept}
            assert other not in rest


@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.data(),
)
def test_groups_partition_the_ranks_of_their_slices(sizes: list[int], data: st.DataObject) -> None:
    mesh = Mesh(tuple((f"a{i}", size) for i, size in enumerate(sizes)))
    fixed = data.draw(st.sampled_from([None, *mesh.names]))
    slices = (
        [Slice()]
        if fixed is None
        else [Slice(((fixed, i),)) for i in range(dict(mesh.axes)[fixed])]
    )
    free = [axis for axis in mesh.names if axis != fixed]
    over = tuple(axis for axis in free if data.draw(st.booleans()))
    group = Group(tuple(slices), over)
    seen = {group.ranks(mesh, rank) for part in slices for rank in mesh.ranks(part)}
    members = list(itertools.chain.from_iterable(seen))
    assert sorted(members) == list(range(mesh.size))
    assert all(len(ranks) == group.size(mesh) for ranks in seen)
