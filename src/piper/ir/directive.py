"""Directive: what a user asked for, as a typed record that rewrites a graph and prints as code."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import msgspec

from piper.errors import Call, StrategyError
from piper.ir.form.python_code import call_code, code_of
from piper.ir.graph import Graph
from piper.ir.layouts import Split
from piper.ir.precisions import Precision
from piper.ir.select import Selector

if TYPE_CHECKING:
    from piper.ir.history import Record


class Stages(Protocol):
    """The program as a graph in stages, cut anew from its source."""

    def __call__(
        self,
        tag: str,
        num: int,
        *,
        costs: Mapping[str, float] | None,
        together: Sequence[Sequence[int]] | None,
        call: Call,
    ) -> Graph: ...

    def measured(self, num: int, *, rows: int | None, call: Call) -> dict[str, float]: ...

    def splits(self, chunks: Sequence[int], size: int, *, call: Call) -> dict[str, Split]: ...

    def seconds(
        self,
        graph: Graph,
        history: Sequence[Record],
        *,
        machine: Any,
        tag: str,
        stages: Sequence[Sequence[int]] | None,
        precision: Precision | str | None,
        call: Call,
    ) -> Any: ...


@dataclass(frozen=True)
class Site:
    """Where a directive is issued: the user's call, its number in the history, and what precedes it."""

    call: Call
    origin: int = 0
    before: Sequence[Record] = ()
    stages: Stages | None = None


class AnyDirective:
    """What all directives can do, also those that nobody here knows (`Unknown`)."""

    __slots__ = ()
    recuts: ClassVar[bool] = False  # a replay starts from its result: it cuts the program itself
    of_training: ClassVar[bool] = False  # it means nothing to an evaluation

    @property
    def kind(self) -> str:
        """The name by which users call it, and files know it."""
        raise NotImplementedError

    def settled(self, graph: Graph, site: Site) -> AnyDirective:
        """The same with what it asks to be found out, as the history keeps it: to be applied again
        without another look."""
        return self

    def among(self, leaves: Collection[str]) -> AnyDirective:
        """The same for batches that have only these of the leaves it may name."""
        return self

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        """The graph after this directive; raises if a requirement is not met."""
        raise NotImplementedError

    def code(self) -> str:
        """The line of a strategy that issues it."""
        raise NotImplementedError

    def result(self) -> Any:
        """What the user's line gives back."""


class Directive(
    AnyDirective,
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=str.lower,
):
    """A directive: its fields are the arguments that users give, by their names.

    The user's signature is that of the class or, where it has a class method `of`, of that. A class
    with `kw_only=True` takes its own fields by name only. Defining a class is all it takes: its name
    in lower case (or `tag=`) becomes a method of every Schedule.
    """

    @property
    def kind(self) -> str:
        return kind_of(type(self))

    def typed(self) -> Self:
        """The same with every argument in the type of its field, as far as it can be."""
        converted = {}
        for field in _fields(type(self)):
            try:
                argument = getattr(self, field.name)
                converted[field.name] = msgspec.convert(argument, field.type, strict=True)
            except msgspec.ValidationError:
                continue  # the rewrite refuses it in its own words; else `mistyped` does
        return msgspec.structs.replace(self, **converted)

    def mistyped(self) -> tuple[str, str] | None:
        """The first argument that is not of the type of its field, and why."""
        for field in _fields(type(self)):
            try:
                msgspec.convert(getattr(self, field.name), field.type, strict=True)
            except msgspec.ValidationError as error:
                return field.name, str(error)
        return None

    def code(self) -> str:
        return call_code(f"s.{self.kind}", *self.arguments())

    def arguments(self) -> tuple[list[str], dict[str, Any]]:
        """Its arguments for printing: code of those without a name, and the named ones."""
        plain: list[str] = []
        named: dict[str, Any] = {}
        for parameter in signature(type(self)).parameters.values():
            value = getattr(self, parameter.name)
            required = parameter.default is parameter.empty
            if required and parameter.kind is not parameter.KEYWORD_ONLY:
                plain.append(code_of(value))
            elif required or value != parameter.default:
                named[parameter.name] = value
        return plain, named


@functools.cache
def _fields(directive: type[Directive]) -> tuple[msgspec.structs.FieldInfo, ...]:
    """The arguments of all directives of a class; made once, since types are read from text."""
    return msgspec.structs.fields(directive)


def kind_of(directive: type[Directive]) -> str:
    """The kind of all directives of a class."""
    return str(directive.__struct_config__.tag)


class Selecting(Directive, frozen=True):
    """A directive about the nodes that a selector selects, which comes first."""

    selector: Selector


class Unknown(AnyDirective, dict[str, Any]):
    """A directive of a class that this process does not have, as the data that a file holds.

    It prints and is written again as it was read; only rewriting needs its class.
    """

    __slots__ = ()

    @property
    def kind(self) -> str:
        return str(self["kind"])

    def code(self) -> str:
        return call_code(f"s.{self.kind}", [], {k: v for k, v in self.items() if k != "kind"})

    def rewrite(self, graph: Graph, site: Site) -> Graph:
        raise StrategyError(
            f"no directive is called {self.kind!r} here",
            call=site.call,
            details=[self.code()],
            legal="import the module that defines it first",
        )
