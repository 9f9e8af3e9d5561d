"""shard_tensor: parameters cut along a dim over an axis, and with them the code that reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from piper.directives.owning import axes_of, check_stream, own
from piper.errors import Call, TensorError, did_you_mean
from piper.ir.attention_forms import ATTENTION, Attention
from piper.ir.directive import AnyDirective, Selecting, Site
from piper.ir.graph import Graph
from piper.ir.layouts import Split, split_in
from piper.ir.nodes import Chunk, Owner
from piper.ir.select import select
from piper.ir.values import Value

DEFAULT_STREAM = "tensor"
AUTO = "auto"
LEAF = "batch:"  # how Values of the batch's leaves are called
Way = int | tuple[int, int | tuple[int, ...]]  # a dim, also with the number or sizes of its blocks


class ShardTensor(Selecting, frozen=True, kw_only=True, tag="shard_tensor"):
    """Cut tensors of the selected chunks over the axis `over`: tensor, sequence and context parallelism.

    `params` says along which dim each is cut, by name or pattern; the first that matches counts, and
    the rest stay whole. A matrix that is several side by side is cut in blocks, of which each rank has
    its part: `(0, 3)` cuts dim 0 in three equal ones (queries, keys and values of one matrix), and
    `(0, (32, 8, 8))` in ones of these sizes (fewer heads of keys and values). With "auto" they are
    found: matrices by column and, behind those, by row, tables by their rows, wherever nothing has to be
    gathered in between; the history keeps what was found.

    Lowering cuts the code likewise, by a rule per operator, into pieces between which layouts change:
    a product by row leaves terms of a sum, which are reduced (all_reduce). With `sequence`, the dim of a
    leaf of the batch, the sums are cut along what that dim leads to (reduce_scatter), so that norms and
    residuals are cut, too, and gathered for the next product. With `batch`, the dim of leaves of which
    each rank takes its part, all code is cut along them, and `attention` says how queries meet all
    keys: "gather" brings keys and values of all ranks to each; "heads" gives each rank whole sequences
    of some heads, and turns the result back (all_to_all, Ulysses); "ring" passes keys and values from
    rank to rank (shift), beside the attention to those that came before. In a ring each rank has an
    early and a late part of sequences, so that all have equal work; if lengths do not divide by twice
    the ranks, it has one part, and the last rank has most to see. Where a form is not possible, keys are
    gathered. An operator without a rule gets what it reads whole. `job.summary()` names both.

    With `strips=2` or more, products by column and by row compute their tokens in so many strips, each
    with its share of every rank's tokens: while one is computed, the next is gathered and the one before
    summed. That hides communication in one microbatch, and makes more and smaller products and messages.

    Requires:
        1. `over` names one axis of the mesh.
        2. No selected chunk has another owner of that axis, and all chunks have this one; but for
           experts that `shard` splits over it.
        3. Each pattern matches a parameter of the selected chunks, which has that dim. Blocks make up
           all of the dim, and along another axis it is not cut.
        4. What is cut divides by the number of ranks, and so does each block.
        5. Leaves in `sequence` and `batch` are of the batch, and their dim is one that is not cut into
           microbatches.
        6. `attention` is "gather", "heads" or "ring", the last two only with `batch`, and the same
           for all chunks.
        7. Experts that are sharded along another axis compute without communication along this one:
           what is cut in them is summed or gathered behind them.
        8. Where `shard` splits experts over this axis, `sequence` or `batch` gives each rank rows of its
           own, which `piper.mixture` sorts and puts back.
        9. `strips` is a whole number from 1, and the same for all chunks.

    Rewrite:
        s.shard_tensor(where(), over='tp', params={'a.weight': 0, 'b.weight': 1})
        # changes 4 nodes

        F[PP=0]  F[PP=1]  B[PP=1]  B[PP=0]
            owners + Owner(axis=tp, how=shard_tensor, shares=tensors, stream=tensor, origin=1)
        batch:x  %x  %reshape  $d.%x/1  $one
            layout {} -> {tp: replicated}
        a.weight  $d.a.weight/0
            layout {} -> {tp: split(0)}
            cut + (tp, split(0))
        b.weight  $d.b.weight/1
            layout {} -> {tp: split(1)}
            cut + (tp, split(1))

    Example:
        >>> s.shard_tensor(where(), over="ep", params={"*.mlp.weight": 0, "*.qkv.*": (0, 3)})
        >>> s.graph.values["stages.0.mlp.weight"].layout
        (('ep', Split(dim=0)),)
        >>> s.graph.values["stages.0.qkv.weight"].layout
        (('ep', Split(dim=0, blocks=3)),)
    """

    over: str
    params: dict[str, Way] | str = AUTO
    sequence: dict[str, int] | None = None
    batch: dict[str, int] | None = None
    attention: Attention = "gather"
    strips: int = 1
    stream: str | None = None

    def settled(self, graph: Graph, site: Site) -> AnyDirective:
        if self.params != AUTO:
            return self
        _, size = self._axis(graph, site.call)
        if site.stages is None:
            raise TensorError(
                'params="auto" needs the program\'s code',
                call=site.call,
                legal="program.apply(...)",
            )
        nodes = (graph.nodes[name] for name in select(graph, self.selector, call=site.call))
        numbers = sorted({node.chunk for node in nodes if isinstance(node, Chunk)})
        found = site.stages.splits(numbers, size, call=site.call) if size > 1 else {}
        params = {name: _way(split) for name, split in found.items()}
        return msgspec.structs.replace(self, params=params)

    def among(self, leaves: Collection[str]) -> ShardTensor:
        def kept(dim_of: dict[str, int] | None) -> dict[str, int] | None:
            found = {leaf: dim for leaf, dim in (dim_of or {}).items() if leaf in leaves}
            return found or dim_of

        return msgspec.structs.replace(self, sequence=kept(self.sequence), batch=kept(self.batch))

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        call = site.call
        axis, size = self._axis(graph, call)
        if not isinstance(self.params, Mapping):
            raise TensorError(
                f"params={self.params!r}",
                call=call,
                requirement=3,
                legal='"auto", or dims by name: {"*.q_proj.weight": 0, "*.o_proj.weight": 1}',
            )
        self._check_leaves(graph, size, call)
        self._check_attention(call)
        self._check_strips(call)
        names = select(graph, self.selector, call=call)
        cut = dict(self._cut(graph, names, size, call))
        values: dict[str, Value] = {}
        for name, value in graph.values.items():
            param = value.of if value.role == "param_grad" else name
            known = dict(value.cut).get(axis)
            if param in cut and known not in (None, cut[param]):
                raise TensorError(
                    f"{param} would be {cut[param]} along {axis}, and is {known} already",
                    call=call,
                    requirement=3,
                    legal="the same cut for all chunks that read a parameter",
                )
            if param in cut and known is None:
                way = (axis, cut[param])
                values[name] = msgspec.structs.replace(value, cut=(*value.cut, way))
        stream = check_stream(graph, self.stream, call=call) if self.stream else DEFAULT_STREAM
        owner = Owner("", "shard_tensor", "tensors", stream, site.origin)
        return own(graph.replacing({}, values), names, (axis,), owner, call=call)

    def _axis(self, graph: Graph, call: Call) -> tuple[str, int]:
        if not isinstance(self.over, str):
            raise TensorError(
                f"over={self.over!r}", call=call, requirement=1, legal="one axis of the mesh"
            )
        (axis,) = axes_of(graph, self.over, call=call)
        return axis, dict(graph.mesh.axes)[axis]

    def _cut(
        self, graph: Graph, names: list[str], size: int, call: Call
    ) -> Iterator[tuple[str, Split]]:
        """The parameters of the selected chunks that are cut."""
        read = {name: None for node in names for name in graph.nodes[node].inputs}
        params = [name for name in read if graph.values[name].role == "param"]
        assert isinstance(self.params, Mapping)
        unused = dict.fromkeys(self.params)
        for name in params:
            for pattern, way in self.params.items():
                if fnmatchcase(name, pattern):
                    unused.pop(pattern, None)
                    split = _split(name, graph.values[name].shape, way, size, call)
                    _check_alone(graph, graph.values[name], self.over, split, call)
                    yield name, split
                    break
        for pattern in unused:
            raise TensorError(
                f"no parameter is called {pattern!r}{did_you_mean(pattern, params)}",
                call=call,
                requirement=3,
                legal="names of parameters of the selected chunks, or patterns such as '*.weight'",
            )

    def _check_leaves(self, graph: Graph, size: int, call: Call) -> None:
        leaves = {
            name.partition("[")[0].removeprefix(LEAF): value.shape
            for name, value in graph.values.items()
            if value.role == "batch"
        }
        for name, dim_of in (("sequence", self.sequence), ("batch", self.batch)):
            if not isinstance(dim_of or {}, Mapping):
                raise TensorError(
                    f"{name}={dim_of!r}",
                    call=call,
                    requirement=5,
                    legal='dims by leaf: {"tokens": 1}',
                )
        for leaf, dim in (*(self.sequence or {}).items(), *(self.batch or {}).items()):
            if leaf not in leaves:
                raise TensorError(
                    f"the batch has no leaf {leaf!r}{did_you_mean(leaf, list(leaves))}",
                    call=call,
                    requirement=5,
                    legal=", ".join(map(repr, leaves)),
                )
            shape = leaves[leaf]
            if type(dim) is not int or not 0 < dim < len(shape) or shape[dim] % size:
                dims = [str(d) for d in range(1, len(shape)) if shape[d] % size == 0]
                raise TensorError(
                    f"{leaf} {list(shape)} cannot be cut along dim {dim} over {size} ranks",
                    call=call,
                    requirement=5,
                    legal=f"dim {' or '.join(dims)}" if dims else "another leaf, or no sequence",
                )

    def _check_attention(self, call: Call) -> None:
        if self.attention not in ATTENTION:
            raise TensorError(
                f"attention={self.attention!r}{did_you_mean(str(self.attention), ATTENTION)}",
                call=call,
                requirement=6,
                legal=", ".join(f'"{name}"' for name in ATTENTION),
            )
        if self.attention != "gather" and not self.batch:
            raise TensorError(
                f"attention={self.attention!r}, but no sequence is cut",
                call=call,
                requirement=6,
                legal=f'batch={{"tokens": 1}}, or attention="{ATTENTION[0]}"',
            )

    def _check_strips(self, call: Call) -> None:
        if type(self.strips) is not int or self.strips < 1:
            raise TensorError(
                f"strips={self.strips!r}",
                call=call,
                requirement=9,
                legal="1 for products in one go, 2 or more to communicate beside them",
            )


def _way(split: Split) -> Way:
    """As a user writes it."""
    assert split.dim is not None
    return split.dim if split.blocks == 1 else (split.dim, split.blocks)


def _split(name: str, shape: tuple[int, ...], way: Way, size: int, call: Call) -> Split:
    """The cut of a parameter that a user means; raises if a rank has no part of it."""
    dim, blocks = way if isinstance(way, tuple | list) and len(way) == 2 else (way, 1)
    if type(dim) is not int or not -len(shape) <= dim < len(shape):
        raise TensorError(
            f"{name} {list(shape)} has no dim {dim!r}",
            call=call,
            requirement=3,
            legal=f"0 to {len(shape) - 1}" if shape else "no dim: it stays whole",
        )
    length = shape[dim]
    sizes = _block_sizes(blocks, length)
    if not sizes:
        raise TensorError(
            f"dim {dim} of {name} {list(shape)} is not made of the blocks {blocks!r}",
            call=call,
            requirement=3,
            legal=f"the number of equal blocks, or sizes that add up to {length}",
        )
    uneven = [num for num in sizes if num % size]
    if uneven and len(sizes) > 1:
        raise TensorError(
            f"a block of {uneven[0]} of dim {dim} of {name} {list(shape)} does not divide over "
            f"{size} ranks",
            call=call,
            requirement=4,
            legal=f"blocks that divide by {size}, or leave it whole",
        )
    if uneven:
        dims = [str(d) for d in range(len(shape)) if shape[d] % size == 0]
        raise TensorError(
            f"dim {dim} of {name} {list(shape)} does not divide over {size} ranks",
            call=call,
            requirement=4,
            legal=f"dim {' or '.join(dims)}" if dims else "leave it whole",
        )
    return split_in(dim % len(shape), sizes)


def _block_sizes(blocks: Any, length: int) -> tuple[int, ...]:
    """Of so many equal blocks of a dim, or as they are given; nothing if they do not make up the dim."""
    if type(blocks) is int:
        counted = 0 < blocks <= max(length, 1) and length % blocks == 0
        return (length // blocks,) * blocks if counted else ()
    given = tuple(blocks) if isinstance(blocks, tuple | list) else ()
    positive = all(type(num) is int and num > 0 for num in given)
    return given if positive and sum(given) == length else ()


def _check_alone(graph: Graph, value: Value, axis: str, split: Split, call: Call) -> None:
    """Blocks are those of the whole dim: no other axis leaves only a part of them."""
    sizes = dict(graph.mesh.axes)
    ways = {a: w for a, w in (*value.layout, *value.cut) if isinstance(w, Split)}
    for other, way in ways.items():
        same_dim = other != axis and sizes[other] > 1 and way.dim == split.dim
        if same_dim and (way.blocks, split.blocks) != (1, 1):
            raise TensorError(
                f"dim {split.dim} of {value.name} is cut along {other} already, and in blocks",
                call=call,
                requirement=3,
                legal="one axis for a dim that is cut in blocks, or another dim",
            )
