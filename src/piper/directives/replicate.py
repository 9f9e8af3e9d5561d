"""replicate: the same parameters on every rank of an axis, each with its share of the batch."""

from __future__ import annotations

from piper.directives.owning import axes_of, check_stream, own
from piper.errors import AxisError, Call
from piper.ir.directive import Selecting, Site
from piper.ir.form.byte_sizes import parse_size
from piper.ir.graph import Graph
from piper.ir.nodes import ONCE, Owner
from piper.ir.select import select

REDUCE_STREAM, GATHER_STREAM = "reduce", "gather"
STEP = "step"  # how often: once


class Replicate(Selecting, frozen=True, kw_only=True):
    """Copy the selected chunks' parameters to every rank along `over`; the batch is shared out.

    With `zero` each rank keeps only its part of the optimizer state (1), also of the gradients (2),
    also of the parameters (3), in flat buckets. Under ZeRO 3 a bucket is gathered for each use and
    freed after it: at most `prefetch` chunks ahead, and for `reuse` uses in a row. Under ZeRO 2 and 3
    gradients are reduced after every `reduce_every` microbatches, of which whole sums are held
    meanwhile. Either is a number, or "step": until the end of the step. What is not said is chosen when
    lowered: under a memory limit the fastest that fits, else sums are held and parameters are not.

    Each rank's gradient of a parameter is then one term of a sum. Lowering turns that into:

    - `zero=0`: all_reduce, and an Update of whole parameters
    - `zero=1`: reduce_scatter after the last backward, an Update of a shard, all_gather
    - `zero=2`: reduce_scatter after every `reduce_every` microbatches, an Update of a shard, all_gather
    - `zero=3`: the same with an all_gather before each use instead; only the shard stays

    Requires:
        1. `over` names axes of the mesh.
        2. No selected chunk has another owner of those axes.
        3. `zero` is 0, 1, 2 or 3, `prefetch` at least 0; `reduce_every` and `reuse` are at least 1, or
           "step". `reduce_every` takes ZeRO 2 or 3: gradients that stay whole are reduced once. `reuse`
           takes ZeRO 3: parameters that stay whole are there all step.
        4. `bucket_size` is a number of bytes, or a text such as "25MiB"; chunks are then cut at the
           boundaries of modules, so that each reads at most so many bytes of parameters. What is not
           said is an eighth of a chunk, but at least 64 MiB, and under ZeRO 2 and 3 at most 512 MiB.
        5. All regions that share a parameter are replicated alike (checked when lowered).

    Rewrite:
        s.replicate(where(), over='dp', zero=2)
        # changes 4 nodes

        F[PP=0]  F[PP=1]  B[PP=1]  B[PP=0]
            owners + Owner(axis=dp, how=replicate, shares=batch, stream=reduce, origin=1, zero=2,
                reduce_every=none, gather_stream=gather)
        batch:x  %x  $d.%x/1
            layout {} -> {dp: split(0)}
        a.weight  b.weight
            layout {} -> {dp: replicated}
        %reshape  $d.a.weight/0  $d.b.weight/1
            layout {} -> {dp: partial}
        $one
            layout {} -> {dp: shared}

    Example:
        >>> s.replicate(where(PP=0, EP=None), over=("dp", "ep"), zero=2)
        >>> s.graph.values["$d.stages.0.mlp.weight/2"].layout
        (('dp', Partial()), ('ep', Partial()))
    """

    over: str | tuple[str, ...]
    zero: int = 0
    reduce_stream: str | None = None
    gather_stream: str | None = None
    bucket_size: int | str | None = None
    prefetch: int = 1
    reduce_every: int | str | None = None
    reuse: int | str | None = None

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        self._check_numbers(site.call)
        axes = axes_of(graph, self.over, call=site.call)
        names = select(graph, self.selector, call=site.call)
        owner = Owner(
            axis="",
            how="replicate",
            shares="batch",
            stream=_stream(graph, self.reduce_stream, REDUCE_STREAM, site.call),
            origin=site.origin,
            bucket_size=self._bucket_bytes(site.call),
            zero=self.zero,
            prefetch=self.prefetch,
            reduce_every=_times(self.reduce_every) if self.zero > 1 else ONCE,
            reuse=_times(self.reuse) if self.zero == 3 else 1,
            gather_stream=_stream(graph, self.gather_stream, GATHER_STREAM, site.call),
        )
        return own(graph, names, axes, owner, call=site.call)

    def _check_numbers(self, call: Call) -> None:
        whole_sums = self.zero in (0, 1) and self.reduce_every not in (None, STEP)
        whole_params = self.zero in (0, 1, 2) and self.reuse not in (None, STEP)
        level = f"with zero={self.zero}"
        for asked, good in (
            (f"zero={self.zero!r}", self.zero in (0, 1, 2, 3)),
            (
                f"prefetch={self.prefetch!r}",
                isinstance(self.prefetch, int) and self.prefetch >= 0,
            ),
            (
                f"reduce_every={self.reduce_every!r} {level}",
                _is_cadence(self.reduce_every) and not whole_sums,
            ),
            (f"reuse={self.reuse!r} {level}", _is_cadence(self.reuse) and not whole_params),
        ):
            if not good:
                raise AxisError(
                    asked,
                    call=call,
                    requirement=3,
                    legal='zero=0, 1, 2 or 3, prefetch=0 or more; reduce_every=1 or more, or "step", '
                    "with zero=2 or 3; reuse likewise, with zero=3",
                )

    def _bucket_bytes(self, call: Call) -> int | None:
        if self.bucket_size is None:
            return None
        return parse_size(self.bucket_size, call=call, requirement=4)


def _is_cadence(value: object) -> bool:
    """How often something happens: every so many, once a step, or not said."""
    return value in (None, STEP) or (type(value) is int and value >= 1)


def _times(value: int | str | None) -> int | None:
    return ONCE if isinstance(value, str) else value


def _stream(graph: Graph, stream: str | None, default: str, call: Call) -> str:
    return check_stream(graph, stream, call=call) if stream else default
