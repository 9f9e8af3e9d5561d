"""Schedule: the object that a strategy talks to; every method is one directive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from piper.directives.complete import complete
from piper.directives.cut import Cut
from piper.directives.declare_mesh import DeclareMesh
from piper.directives.declare_stream import DeclareStream
from piper.directives.order import Order
from piper.directives.place import Place
from piper.directives.recompute import Recompute
from piper.directives.registry import known_directives
from piper.directives.replicate import Replicate
from piper.directives.shard import Shard
from piper.directives.shard_tensor import ShardTensor
from piper.directives.split import Split
from piper.errors import ArgumentError, Call, StrategyError, did_you_mean, user_source
from piper.ir.directive import AnyDirective, Directive, Site, Stages, kind_of
from piper.ir.graph import Graph
from piper.ir.history import Composed, Record, effect_of
from piper.ir.precisions import Precision
from piper.schedules.action_costs import Costs

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class _Giving(Protocol[R_co]):
    """A directive whose line gives back an R."""

    def result(self) -> R_co: ...


def _method(make: Callable[P, _Giving[R_co]]) -> Callable[Concatenate[Schedule, P], R_co]:
    """The method of a Schedule that takes what a directive takes, and issues it.

    `make` is the directive's class, or its class method `of`.
    """
    cls: Any = getattr(make, "__self__", make)
    kind = kind_of(cls)
    taken = signature(make)

    def issue(self: Schedule, /, *args: Any, **kwargs: Any) -> Any:
        call = Call(kind, user_source())
        try:
            taken.bind(*args, **kwargs)
        except TypeError as error:
            raise _not_taken(kind, taken, kwargs, error, call) from None
        return self.apply(make(*args, **kwargs), call=call)  # type: ignore[arg-type]

    itself = Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)
    issue.__signature__ = Signature([itself, *taken.parameters.values()])  # type: ignore[attr-defined]
    issue.__doc__ = cls.__doc__
    issue.__name__, issue.__qualname__ = kind, f"Schedule.{kind}"
    return issue


def _not_taken(
    kind: str, taken: Signature, kwargs: dict[str, Any], error: TypeError, call: Call
) -> ArgumentError:
    unknown = next((name for name in kwargs if name not in taken.parameters), None)
    near = did_you_mean(unknown, list(taken.parameters)) if unknown else ""
    return ArgumentError(f"{error}{near}", call=call, legal=shown_signature(kind, taken))


def shown_signature(kind: str, taken: Signature) -> str:
    """`s.place(selector, at, *, stream=None)`."""
    plain = [p.replace(annotation=p.empty) for p in taken.parameters.values()]
    shown = Signature(plain)
    return f"s.{kind}{shown}"


class Schedule:
    """A graph under construction: each directive rewrites it and is recorded with the user's line.

    Directives that are defined elsewhere are methods too, by their names.
    """

    def __init__(
        self, graph: Graph, history: Sequence[Record] = (), *, stages: Stages | None = None
    ) -> None:
        self.graph = graph
        self.history = list(history)
        self._stages = stages  # the program cut into stages
        self.composed: Composed | None = None  # the call that issues directives now

    @property
    def tags(self) -> dict[str, list[int]]:
        """The values of each tag in the graph."""
        return self.graph.tag_values

    mesh = _method(DeclareMesh.of)
    stream = _method(DeclareStream)
    cut = _method(Cut)
    place = _method(Place)
    replicate = _method(Replicate)
    shard = _method(Shard)
    shard_tensor = _method(ShardTensor)
    split = _method(Split)
    order = _method(Order)
    recompute = _method(Recompute)

    def stage_costs(
        self,
        machine: Any,
        *,
        tag: str = "PP",
        stages: Sequence[Sequence[int]] | None = None,
        precision: Precision | str | None = None,
    ) -> Costs:
        """What F, BI and BW of each stage take on a machine, and a message between two: under the
        directives so far, for a table that goes by costs.

        `machine` and `precision` are those of `lower`; stage i is `tag`=i, or the regions `stages[i]`.
        """
        call = Call("stage_costs", user_source())
        if self._stages is None:
            raise StrategyError("only a program has costs", call=call, legal="program.apply(...)")
        return self._stages.seconds(
            self.graph, self.history, machine=machine, tag=tag, stages=stages,
            precision=precision, call=call,
        )  # fmt: skip

    def apply(self, directive: AnyDirective, *, call: Call | None = None) -> Any:
        """Issue a directive that is given as a record; returns what its method would."""
        call = call or Call(directive.kind, user_source())
        if isinstance(directive, Directive):
            directive = directive.typed()
        site = Site(call, len(self.history), tuple(self.history), self._stages)
        directive = directive.settled(self.graph, site)
        graph = directive.rewrite(self.graph, site)
        if isinstance(directive, Directive) and (wrong := directive.mistyped()):
            field, why = wrong
            raise ArgumentError(
                f"{field}={getattr(directive, field)!r}",
                call=call,
                details=[why],
                legal=shown_signature(directive.kind, signature(type(directive))),
            )
        effect = effect_of(self.graph, graph)
        self.history.append(Record(call, directive, effect, len(graph.nodes), self.composed))
        self.graph = graph
        return directive.result()

    def finish(self) -> Graph:
        """The graph with what the user left open filled in, or the first rule it breaks."""
        self.graph = complete(self.graph, [record.call for record in self.history])
        return self.graph

    def __getattr__(self, name: str) -> Any:
        directives = known_directives()
        if name in directives:
            cls = directives[name]
            return _method(getattr(cls, "of", cls)).__get__(self)
        known = [n for n in (*dir(type(self)), *directives) if not n.startswith("_")]
        raise AttributeError(f"no directive is called {name!r}{did_you_mean(name, known)}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *known_directives()})
