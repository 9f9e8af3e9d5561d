"""What comes out of a cut over ranks: pieces of code, and the changes of layout between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import fx

from piper.bodies.chunk_code import ChunkCode
from piper.errors import Source
from piper.ir.layouts import PARTIAL, REPLICATED, SHARED, Layout, Split
from piper.ir.tensor_type import TensorType


@dataclass(frozen=True, eq=False)
class Change:
    """A Value in another layout: `want` is replicated, shared or split.

    The name is the only one in the chunk, and the same at any number of rows. Pieces below `level` make
    the Value, others read it. At a later turn of a ring, `previous` is the Value at the turn before.
    """

    source: fx.Node
    have: Layout
    want: Layout
    name: str
    level: int
    previous: Change | None = None

    @property
    def shifts(self) -> bool:
        """Whether the Value goes as it is to the next rank of a ring."""
        return isinstance(self.want, Split) and self.want.turn > 0

    @property
    def sends(self) -> bool:
        """Whether the piece that makes the Value makes a stack of it, one entry per rank."""
        turned = isinstance(self.want, Split) and self.have != REPLICATED and not self.shifts
        return self.pads or turned

    @property
    def gathers(self) -> bool:
        """Whether all ranks get the parts of all."""
        return isinstance(self.have, Split) and self.want == SHARED

    @property
    def pads(self) -> bool:
        """Whether all entries of the stack but the rank's own are zeros: their sum is the whole. Its
        gradient is equal on all ranks, and each takes its entry of it, without communication."""
        return isinstance(self.have, Split) and self.want == REPLICATED

    @property
    def sent(self) -> Layout:
        """How the stack lies that the making piece sends."""
        if isinstance(self.have, Split) and isinstance(self.want, Split):
            return _behind_ranks(self.have)
        return PARTIAL

    @property
    def read(self) -> Layout:
        """How what arrives lies."""
        if isinstance(self.have, Split) and isinstance(self.want, Split) and not self.shifts:
            return _behind_ranks(self.want)
        return self.want

    @property
    def stacked(self) -> bool:
        """Whether a stack arrives, one entry per rank."""
        return isinstance(self.have, Split) and not self.shifts


def _behind_ranks(split: Split) -> Split:
    """The same dim of a stack."""
    assert split.dim is not None
    return split.along(split.dim + 1)


@dataclass(frozen=True)
class Ends:
    """Outputs of a chunk, by number, that end in another layout than usual, for the one chunk that reads
    them: `partial` sums are not summed yet, and copies of `shared` rows are made in code that counts as
    different between ranks, so that gradients are summed over ranks where rows are fewer."""

    partial: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()


class SortedApartError(Exception):
    """Code that wants rows of all ranks, where each rank has sorted its own."""


class Ref(NamedTuple):
    """What a piece reads or makes: a node's own Value, one in another layout, the stack that becomes
    one, or the rank's number along the axis."""

    kind: Literal["node", "change", "send", "place"]
    of: fx.Node | Change | None = None


PLACE = Ref("place")


class Reading(NamedTuple):
    """An argument as a reader gets it; with `part`, it takes its part of it on the spot."""

    ref: Ref
    part: Split | None = None


@dataclass(frozen=True)
class Note:
    """An operator that costs communication: it reads whole, or cut in another way, what is split.

    In blocks of sizes `blocks`, if there are any, it could have taken it as it was.
    """

    operator: str
    reason: str
    source: Source | None
    node: fx.Node
    blocks: tuple[int, ...] = ()

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.operator}{where}: {self.reason}"


@dataclass
class Piece:
    """Code that each rank runs on its own parts."""

    code: ChunkCode
    inputs: list[Ref]
    outputs: list[Ref]


@dataclass
class Partitioned:
    """A chunk as one rank runs it.

    `inputs` names the chunk's inputs. `layouts`, and `flows` (whether a gradient passes), are of nodes
    that pieces read or hand on. `marks` says where the sequence is. `param_grads` says how gradients
    lie: None if some of a parameter's readers differ between ranks, and some do not. `as_seen` gives
    what a node has as the surroundings see it.
    """

    pieces: list[Piece]
    changes: list[Change]
    inputs: dict[fx.Node, str]
    layouts: dict[fx.Node, Layout]
    flows: dict[fx.Node, bool]
    outputs: list[Ref]
    out_layouts: list[Layout]
    marks: dict[fx.Node, Split]
    param_grads: dict[str, Layout | None]
    notes: list[Note] = field(default_factory=list)
    as_seen: Callable[[TensorType], TensorType] = lambda spec: spec
