"""replicate: the same parameters on every rank of an axis, each with its share of the batch."""

from __future__ import annotations

from piper.directives.owning import axes_of, check_stream, own
from piper.errors import AxisError, Call
from piper.ir.graph import Graph
from piper.ir.select import Selector, select
from piper.ir.sizes import parse_size

DEFAULT_STREAM = "reduce"


def replicate(
    graph: Graph,
    selector: Selector,
    *,
    over: str | tuple[str, ...],
    zero: int,
    reduce_stream: str | None,
    bucket_size: int | str | None = None,
    origin: int,
    call: Call,
) -> Graph:
    """Copy the selected chunks' parameters to every rank along `over`; the batch is shared out.

    Requires:
        1. `over` names axes of the mesh.
        2. No selected chunk has another owner of those axes.
        3. `zero` is 0: parameters, gradients and optimizer state are whole on every rank.
        4. `bucket_size` is a number of bytes, or a text such as "25MiB"; chunks are then cut at the
           boundaries of modules, so that each reads at most so many bytes of parameters.

    Rewrite:
        param_grad {} -> param_grad {dp: partial}, which lowering turns into
        all_reduce over dp before the Update

    Example:
        >>> s.replicate(where(PP=0, EP=None), over=("dp", "ep"))
        >>> s.graph.values["$d.stages.0.mlp.weight/2"].layout
        (('dp', 'partial'), ('ep', 'partial'))
    """
    if zero != 0:
        raise AxisError(
            f"zero={zero} is not supported yet", call=call, requirement=3, legal="zero=0"
        )
    axes = axes_of(graph, over, call=call)
    names = select(graph, selector, call=call)
    stream = check_stream(graph, reduce_stream, call=call) if reduce_stream else DEFAULT_STREAM
    size = None if bucket_size is None else parse_size(bucket_size, call=call, requirement=4)
    return own(
        graph,
        names,
        axes,
        "replicate",
        stream=stream,
        origin=origin,
        call=call,
        bucket_size=size,
    )
