"""Communication kinds: the name of one in, all that is true of every communication of it out.

This is the only list of them. Passes, proofs, transports, costs and reports read its rows; a transport
adds how the bytes move. `add_communication` adds a row from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from piper.errors import PlanError, did_you_mean


class Tensorlike(Protocol):
    """What has a shape and a dtype; with a `bound`, dim 0 depends on the data."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def bound(self) -> int | None: ...


LEFT = 4  # multiprocessors that products leave to communication, where its stream has no bound
MOST_LEFT = 1 << 10  # that they may be asked to leave

# Whether a result can come from what each rank brings: source, result, number of ranks, and whether the
# host says how many rows go where.
ShapeRule = Callable[[Tensorlike, Tensorlike, int, bool], bool]


@dataclass(frozen=True)
class CommunicationKind:
    """One kind of communication.

    A `message` passes one tensor from a rank to another, and each kind of message is one end of it;
    in a `collective` all ranks of a group take part. It `brings` a tensor from each rank and
    `leaves` one there. `sums` says that results are sums over ranks; `result` how they lie: the same
    shape as what is brought, a part of it per rank, the parts of all ranks, or rows from every rank.
    `by_rows` kinds may let the host say how many rows go to whom. `carries(brought, ranks)` are the
    bytes that a rank's link carries each way, in `rounds(ranks)` exchanges one after the other. A
    kind `of_a_step` belongs to a step's state: it may come last, where others follow from one chunk
    and are waited for. A `paced` one starts shortly before its result is read.
    In one that is `directed`, ranks of a group pass tensors on to the next, or back (`reverse`).
    A collective is the change between two layouts (`ir/layouts.py`), unless it `keeps_layout`.
    """

    name: str
    form: Literal["message", "collective"]
    result: Literal["same", "part", "whole", "rows"]
    fits: ShapeRule
    carries: Callable[[int, int], float]
    rounds: Callable[[int], int] = lambda ranks: 1
    brings: bool = True
    leaves: bool = True
    sums: bool = False
    by_rows: bool = False
    of_a_step: bool = False
    paced: bool = False
    keeps_layout: bool = False
    directed: bool = False

    @property
    def is_message(self) -> bool:
        return self.form == "message"

    @property
    def sends(self) -> bool:
        """It keeps what it sends until its peer has it: nobody waits for it, whoever frees that."""
        return self.is_message and self.brings

    @property
    def receives(self) -> bool:
        return self.is_message and self.leaves

    @property
    def waits_for_peers(self) -> bool:
        """Whether it holds its place on a device until others come."""
        return self.leaves

    @property
    def reduces(self) -> bool:
        """Every rank gets the whole sum."""
        return self.sums and self.result == "same"

    @property
    def scatters(self) -> bool:
        """Every rank gets its part of the sum."""
        return self.sums and self.result == "part"

    @property
    def gathers(self) -> bool:
        """Every rank gets the parts of all."""
        return not self.sums and self.result == "whole"

    @property
    def alike(self) -> bool:
        """Whether all ranks bring tensors of one shape."""
        return not self.by_rows


def same_tensor(one: Tensorlike, other: Tensorlike) -> bool:
    """Equal shape and dtype; a dim that depends on the data only has the same bound."""
    if one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return False
    if one.bound is not None or other.bound is not None:
        return one.bound == other.bound and one.shape[1:] == other.shape[1:]
    return one.shape == other.shape


def _same(source: Tensorlike, result: Tensorlike, ranks: int, by_host: bool) -> bool:
    return same_tensor(source, result)


def _whole(source: Tensorlike, result: Tensorlike, ranks: int, by_host: bool) -> bool:
    sizes = math.prod(result.shape) == math.prod(source.shape) * ranks
    return sizes and source.dtype == result.dtype


def _part(source: Tensorlike, result: Tensorlike, ranks: int, by_host: bool) -> bool:
    sizes = math.prod(source.shape) == math.prod(result.shape) * ranks
    return sizes and source.dtype == result.dtype


def _rows(source: Tensorlike, result: Tensorlike, ranks: int, by_host: bool) -> bool:
    if source.dtype != result.dtype:
        return False
    if by_host:
        return source.shape[1:] == result.shape[1:]
    even = bool(source.shape) and source.shape[0] % ranks == 0
    if not even or math.prod(source.shape) != math.prod(result.shape):
        return False
    return source.shape == result.shape or result.shape[:1] == (ranks,)


def _brought(brought: int, ranks: int) -> float:
    return float(brought)


def _nothing(brought: int, ranks: int) -> float:
    return 0.0  # the send takes the time


def _to_others(brought: int, ranks: int) -> float:
    return brought * (ranks - 1) / ranks


def _from_others(brought: int, ranks: int) -> float:
    return float(brought) * (ranks - 1)


def _twice(brought: int, ranks: int) -> float:
    return 2 * _to_others(brought, ranks)  # each rank sums a part, and all get all parts


def _ring(ranks: int) -> int:
    return ranks - 1


_ROWS = (
    CommunicationKind("send", "message", "same", _same, _brought, leaves=False),
    CommunicationKind("recv", "message", "same", _same, _nothing, brings=False, paced=True),
    CommunicationKind(
        "all_reduce", "collective", "same", _same, _twice, lambda ranks: 2 * _ring(ranks),
        sums=True, of_a_step=True,
    ),
    CommunicationKind(
        "reduce_scatter", "collective", "part", _part, _to_others, _ring, sums=True
    ),
    CommunicationKind(
        "all_gather", "collective", "whole", _whole, _from_others, _ring,
        of_a_step=True, paced=True,
    ),
    CommunicationKind("all_to_all", "collective", "rows", _rows, _to_others, by_rows=True),
    CommunicationKind("shift", "collective", "same", _same, _brought, directed=True),
)  # fmt: skip
COMMUNICATION: dict[str, CommunicationKind] = {row.name: row for row in _ROWS}


def add_communication(row: CommunicationKind) -> None:
    """Let plans have a further kind."""
    if row.name in COMMUNICATION:
        raise PlanError(f"there is already a communication {row.name!r}")
    COMMUNICATION[row.name] = row


def communication(name: str) -> CommunicationKind:
    """The row of a kind; raises if there is none."""
    row = COMMUNICATION.get(name)
    if row is None:
        raise PlanError(
            f"no communication is called {name!r}{did_you_mean(name, list(COMMUNICATION))}",
            legal=", ".join(COMMUNICATION),
        )
    return row
