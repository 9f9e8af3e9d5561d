"""replicate: the same parameters on every rank of an axis, each with its share of the batch."""

from __future__ import annotations

from piper.directives.owning import axes_of, check_stream, own
from piper.errors import AxisError, Call
from piper.ir.byte_sizes import parse_size
from piper.ir.graph import Graph
from piper.ir.nodes import Owner
from piper.ir.select import Selector, select

REDUCE_STREAM, GATHER_STREAM = "reduce", "gather"
BUCKET_SIZE = (
    64 << 20
)  # bytes of parameters that are reduced or gathered at once under ZeRO 2 and 3


def replicate(
    graph: Graph,
    selector: Selector,
    *,
    over: str | tuple[str, ...],
    zero: int,
    bucket_size: int | str | None,
    prefetch: int,
    reuse: int,
    reduce_stream: str | None,
    gather_stream: str | None,
    origin: int,
    call: Call,
) -> Graph:
    """Copy the selected chunks' parameters to every rank along `over`; the batch is shared out.

    With `zero` each rank keeps only its part of the optimizer state (1), also of the gradients (2),
    also of the parameters (3), in flat buckets. Under ZeRO 3 a bucket is gathered for each use and
    freed after it: at most `prefetch` chunks ahead, and for `reuse` microbatches in a row.

    Requires:
        1. `over` names axes of the mesh.
        2. No selected chunk has another owner of those axes.
        3. `zero` is 0, 1, 2 or 3, `prefetch` at least 0 and `reuse` at least 1.
        4. `bucket_size` is a number of bytes, or a text such as "25MiB"; chunks are then cut at the
           boundaries of modules, so that each reads at most so many bytes of parameters.
        5. All regions that share a parameter are replicated alike (checked when lowered).

    Rewrite:
        param_grad {} -> param_grad {dp: partial}, which lowering turns into
        zero=0: all_reduce over dp, Update of whole parameters
        zero=1: reduce_scatter after the last backward, Update of a shard, all_gather
        zero=2: reduce_scatter after each backward, Update of a shard, all_gather
        zero=3: also all_gather before each use; the Update's shard is all that stays

    Example:
        >>> s.replicate(where(PP=0, EP=None), over=("dp", "ep"), zero=2)
        >>> s.graph.values["$d.stages.0.mlp.weight/2"].layout
        (('dp', Partial()), ('ep', Partial()))
    """
    for name, value, good in (
        ("zero", zero, zero in (0, 1, 2, 3)),
        ("prefetch", prefetch, isinstance(prefetch, int) and prefetch >= 0),
        ("reuse", reuse, isinstance(reuse, int) and reuse >= 1),
    ):
        if not good:
            raise AxisError(
                f"{name}={value}",
                call=call,
                requirement=3,
                legal="zero=0, 1, 2 or 3, prefetch=0 or more, reuse=1 or more",
            )
    axes = axes_of(graph, over, call=call)
    names = select(graph, selector, call=call)
    reducing = check_stream(graph, reduce_stream, call=call) if reduce_stream else REDUCE_STREAM
    gathering = check_stream(graph, gather_stream, call=call) if gather_stream else GATHER_STREAM
    size = BUCKET_SIZE if zero > 1 else None
    if bucket_size is not None:
        size = parse_size(bucket_size, call=call, requirement=4)
    owner = Owner(
        axis="",
        how="replicate",
        shares="batch",
        stream=reducing,
        origin=origin,
        bucket_size=size,
        zero=zero,
        prefetch=prefetch,
        reuse=reuse,
        gather_stream=gathering,
    )
    return own(graph, names, axes, owner, call=call)
