"""Schedule: the object that a strategy talks to; every method is one directive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from piper.directives.complete import complete
from piper.directives.cut import cut
from piper.directives.order import Group, order, order_table
from piper.directives.place import place
from piper.directives.recompute import Keep, recompute
from piper.directives.replicate import replicate
from piper.directives.shard import shard
from piper.directives.split import split
from piper.errors import Call, MeshError, did_you_mean, user_source
from piper.ir.graph import Graph, Stream
from piper.ir.history import Record
from piper.ir.python_code import keywords_code
from piper.ir.select import Selector
from piper.mesh import Mesh, Slice
from piper.schedules.catalog import as_code
from piper.schedules.table import Table

Rewrite = Callable[[Graph], Graph]


class Schedule:
    """A graph under construction: each directive rewrites it and is recorded with the user's line."""

    def __init__(
        self,
        graph: Graph,
        history: Sequence[Record] = (),
        rewrites: Sequence[Rewrite] = (),
        *,
        stages: Callable[..., Graph] | None = None,
    ) -> None:
        self.graph = graph
        self.history = list(history)
        self.rewrites = list(rewrites)  # one per Record, to be replayed on finer chunks
        self._stages = stages  # the program cut into stages

    @property
    def tags(self) -> dict[str, list[int]]:
        """The values of each tag in the graph."""
        return self.graph.tag_values

    def mesh(self, **axes: int) -> Mesh:
        """Name the devices' axes and their sizes: `s.mesh(pp=2, dp=4)`.

        Requires:
            1. The schedule has no mesh yet.
            2. Every size is an integer of at least 1.

        Rewrite:
            mesh (one device)  ->  mesh pp=2 dp=4: ranks 0..7, the last axis varies fastest

        Example:
            >>> mesh = s.mesh(pp=2, dp=4)
            >>> list(mesh.ranks(mesh.at(pp=1)))
            [4, 5, 6, 7]
        """
        call = self._call("mesh")
        if self.graph.mesh.axes:
            raise MeshError("the mesh is declared twice", call=call, requirement=1)
        for axis, size in axes.items():
            if not isinstance(size, int) or size < 1:
                raise MeshError(f"axis {axis} has size {size!r}", call=call, requirement=2)
        made = Mesh(tuple(axes.items()))
        self._apply(call, _show(**axes), lambda g: msgspec.structs.replace(g, mesh=made))
        return made

    def stream(
        self,
        name: str,
        *,
        priority: Literal["normal", "high"] = "normal",
        max_sms: int | None = None,
    ) -> str:
        """Name a queue, with its priority and how many SMs its communication may take.

        `priority` is "normal" or "high"; both are for CUDA, on CPU every stream is alike.

        Requires:
            1. No stream has that name yet.

        Rewrite:
            streams (none)  ->  streams dp: an in-order queue on every device, for directives to name

        Example:
            >>> dp = s.stream("dp", priority="high")
            >>> s.replicate(where(PP=0, EP=None), over=("dp", "ep"), reduce_stream=dp)
            >>> {owner.stream for owner in s.graph.nodes["F[PP=0.0]"].owners}
            {'dp'}
        """
        call = self._call("stream")
        if any(stream.name == name for stream in self.graph.streams):
            raise MeshError(f"the stream {name!r} is declared twice", call=call, requirement=1)
        made = Stream(name, priority, max_sms)
        self._apply(
            call,
            _show(name, priority=None if priority == "normal" else priority, max_sms=max_sms),
            lambda g: msgspec.structs.replace(g, streams=(*g.streams, made)),
        )
        return name

    def cut(self, tag: str, num: int, costs: Mapping[str, float] | None = None) -> None:
        call = self._call("cut")
        before = [record.call for record in self.history]
        assert self._stages is not None, "only a program can be cut"
        stages = partial(self._stages, tag, num, costs=costs, call=call)
        self._apply(
            call,
            _show(tag, num, costs=None if costs is None else dict(costs)),
            lambda g: cut(g, tag, num, stages=stages, before=before, call=call),
        )
        self.rewrites[-1] = _nothing  # what is replayed starts from a graph that is cut already

    def place(self, selector: Selector, at: Slice, *, stream: str | None = None) -> None:
        call, origin = self._call("place"), len(self.history)
        mesh = "mesh" if any(r.call.name == "mesh" for r in self.history) else "piper.Mesh()"
        slice_code = f"{mesh}.at({_show(**dict(getattr(at, 'fixed', ())))})"
        self._apply(
            call,
            ", ".join([str(selector), slice_code, *([_show(stream=stream)] if stream else [])]),
            lambda g: place(g, selector, at, stream=stream, origin=origin, call=call),
        )

    def replicate(
        self,
        selector: Selector,
        *,
        over: str | tuple[str, ...],
        zero: int = 0,
        reduce_stream: str | None = None,
        gather_stream: str | None = None,
        bucket_size: int | str | None = None,
        prefetch: int = 1,
        reuse: int = 1,
    ) -> None:
        call, origin = self._call("replicate"), len(self.history)
        self._apply(
            call,
            _show(
                selector,
                over=over,
                zero=zero or None,
                reduce_stream=reduce_stream,
                gather_stream=gather_stream,
                bucket_size=bucket_size,
                prefetch=None if prefetch == 1 else prefetch,
                reuse=None if reuse == 1 else reuse,
            ),
            lambda g: replicate(
                g,
                selector,
                over=over,
                zero=zero,
                reduce_stream=reduce_stream,
                gather_stream=gather_stream,
                bucket_size=bucket_size,
                prefetch=prefetch,
                reuse=reuse,
                origin=origin,
                call=call,
            ),
        )

    def shard(
        self, selector: Selector, *, over: str | tuple[str, ...], stream: str | None = None
    ) -> None:
        call, origin = self._call("shard"), len(self.history)
        self._apply(
            call,
            _show(selector, over=over, stream=stream),
            lambda g: shard(g, selector, over=over, stream=stream, origin=origin, call=call),
        )

    def split(self, selector: Selector, tag: str, num: int) -> None:
        call, origin = self._call("split"), len(self.history)
        self._apply(
            call,
            _show(selector, tag, num),
            lambda g: split(g, selector, tag, num, origin=origin, call=call),
        )

    def order(
        self,
        groups: Sequence[Group] | Table,
        *,
        axis: str = "pp",
        tag: str = "PP",
        microbatch: str = "MB",
        direction: str = "DIR",
        stages: Sequence[Sequence[int]] | None = None,
    ) -> None:
        call, origin = self._call("order"), len(self.history)
        groups = _kept(groups)
        if isinstance(groups, Table):
            table = groups
            self._apply(
                call,
                lambda: _show_table(table, axis, tag, microbatch, direction, stages),
                lambda g: order_table(
                    g,
                    table,
                    axis=axis,
                    tag=tag,
                    microbatch=microbatch,
                    direction=direction,
                    stages=stages,
                    origin=origin,
                    call=call,
                ),
            )
        else:
            self._apply(
                call,
                lambda: f"[{', '.join(map(_show_group, groups))}]",
                lambda g: order(g, groups, origin=origin, call=call),
            )

    def recompute(self, selector: Selector, *, keep: Keep = "nothing") -> None:
        call, origin = self._call("recompute"), len(self.history)
        self._apply(
            call,
            _show(selector, keep=keep),
            lambda g: recompute(g, selector, keep=keep, origin=origin, call=call),
        )

    def finish(self) -> Graph:
        """The graph with what the user left open filled in, or the first rule it breaks."""
        self.graph = complete(self.graph, [record.call for record in self.history])
        return self.graph

    def __getattr__(self, name: str) -> Any:
        known = [n for n in dir(type(self)) if not n.startswith("_")]
        raise AttributeError(f"no directive is called {name!r}{did_you_mean(name, known)}")

    def _call(self, name: str) -> Call:
        return Call(name, user_source())

    def _apply(self, call: Call, arguments: str | Callable[[], str], rewrite: Rewrite) -> None:
        before = self.graph
        self.graph = rewrite(before)
        came = gone = 0
        if self.graph.splits != before.splits:
            came, gone = len(self.graph.nodes), len(before.nodes)
        shown = arguments if isinstance(arguments, str) else arguments()
        self.history.append(Record(call, shown, added=came, removed=gone))
        self.rewrites.append(rewrite)


for _method, _function in (
    (Schedule.cut, cut),
    (Schedule.place, place),
    (Schedule.replicate, replicate),
    (Schedule.shard, shard),
    (Schedule.split, split),
    (Schedule.order, order),
    (Schedule.recompute, recompute),
):
    _method.__doc__ = _function.__doc__
assert Schedule.order.__doc__ is not None
Schedule.order.__doc__ += f"\n    With a table instead of groups:\n\n    {order_table.__doc__}"


def _nothing(graph: Graph) -> Graph:
    return graph


def _show(*args: Any, **kwargs: Any) -> str:
    words = [str(arg) if isinstance(arg, Selector) else repr(arg) for arg in args]
    words += keywords_code({key: value for key, value in kwargs.items() if value is not None})
    return ", ".join(words)


def _kept(groups: Any) -> Any:
    """Groups that can be read twice: to apply them and to record them."""
    if isinstance(groups, Iterator):
        groups = list(groups)
    if not isinstance(groups, list | tuple):
        return groups
    return [list(group) if isinstance(group, Iterator) else group for group in groups]


def _show_table(
    table: Table,
    axis: str,
    tag: str,
    microbatch: str,
    direction: str,
    stages: Sequence[Sequence[int]] | None,
) -> str:
    given = {
        "axis": None if axis == "pp" else axis,
        "tag": None if tag == "PP" else tag,
        "microbatch": None if microbatch == "MB" else microbatch,
        "direction": None if direction == "DIR" else direction,
        "stages": [list(members) for members in stages] if stages else None,
    }
    more = _show(**given)
    return f"{as_code(table)}, {more}" if more else as_code(table)


def _show_group(group: Group) -> str:
    if isinstance(group, Selector):
        return str(group)
    return f"[{', '.join(map(str, group))}]"
