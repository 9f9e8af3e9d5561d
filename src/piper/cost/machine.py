"""Machine: what a device, its host and its links can do: the one way from work to seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from piper.errors import FileError
from piper.ir.communication import CommunicationKind


class Link(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a rank reaches others: seconds for the smallest exchange, bytes a second each way, and the
    share of the device that moving takes away from computation. A collective has the latency of all
    its `rounds`, or of one."""

    latency: float
    bandwidth: float
    share: float = 0.0
    rounds: bool = True


@dataclass(frozen=True)
class Exchange:
    """What a communication takes: until the first byte is there, then of a link that it has alone; and
    the share of the device while it goes on."""

    latency: float
    seconds: float = 0.0
    share: float = 0.0


class Linear(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of a kind of work: a fixed part, and one for each byte touched."""

    fixed: float = 0.0
    per_byte: float = 0.0

    def __call__(self, nbytes: float) -> float:
        return self.fixed + self.per_byte * nbytes


class Curve(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds of a kind of communication, as measured for some numbers of bytes: between two of them on
    a line; beyond the last at the rate before it, or at that of the whole where the time did not rise.
    `share` is what it takes of the device meanwhile."""

    points: list[tuple[float, float]]  # (bytes, seconds), both ascending
    share: float = 0.0

    def __call__(self, nbytes: float) -> float:
        points = self.points
        if nbytes <= points[0][0] or len(points) == 1:
            return points[0][1]
        after = next((i for i, (size, _) in enumerate(points) if size >= nbytes), len(points) - 1)
        (low, least), (high, most) = points[after - 1], points[after]
        rate = (most - least) / (high - low)
        if nbytes > high:
            return most + (nbytes - high) * (rate or most / high)
        return least + (nbytes - low) * rate

    @property
    def fixed(self) -> float:
        """What the smallest takes."""
        return self.points[0][1]


def exchange_name(kind: str, ranks: int, *, across: bool) -> str:
    """What communication between so many ranks is called by a machine: `all_reduce/4`."""
    return f"{kind}/{ranks}" + ("/network" if across else "")


class Machine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One kind of rank and its links: `node` between the `ranks_per_node` ranks of a node, `network`
    between nodes.

    Where the `host_computes`, as on a CPU, it runs every task itself and only communication goes on
    beside; else it hands tasks to a device's streams, `dispatch` seconds each. A communication whose
    peers are not there yet `holds_share` of the device, or not. What was measured comes before what is
    estimated: seconds of `bodies` by their hash, of other `kinds` of tasks by bytes, and of `exchanges`.
    """

    name: str
    flops: dict[str, float]  # dtype -> operations a second that matrix products reach
    bandwidth: float  # bytes a second, of the device's own memory
    node: Link
    network: Link
    ranks_per_node: int
    lanes: float = 1.0  # of a link: so many exchanges at once are as fast as one
    launch: float = 0.0  # what the smallest piece of work takes
    dispatch: float = 0.0
    exchange: float = 0.0  # of the host, for starting a communication
    between: float = 0.0  # of the host, from one step to the next
    sms: int = 0  # that `max_sms` of a stream are a part of
    host_computes: bool = False
    holds_share: bool = True
    source: str = ""  # where the figures come from
    bodies: dict[str, float] = {}
    kinds: dict[str, Linear] = {}
    exchanges: dict[str, Curve] = {}

    def __post_init__(self) -> None:
        rates = {f"flops of {dtype}": rate for dtype, rate in self.flops.items()}
        rates |= {name: getattr(self, name) for name in ("bandwidth", "ranks_per_node", "lanes")}
        figures = {
            name: getattr(self, name)
            for name in ("launch", "dispatch", "exchange", "between", "sms")
        }
        figures |= {f"body {body}": seconds for body, seconds in self.bodies.items()}
        shares = {}
        for name, link in (("node", self.node), ("network", self.network)):
            rates[f"bandwidth of {name}"] = link.bandwidth
            figures[f"latency of {name}"] = link.latency
            shares[f"share of {name}"] = link.share
        for kind, line in self.kinds.items():
            figures |= {f"fixed of {kind}": line.fixed, f"per_byte of {kind}": line.per_byte}
        for kind, curve in self.exchanges.items():
            shares[f"share of {kind}"] = curve.share
            if not _ascends(curve.points):
                raise FileError(
                    f"machine {self.name}: points of {kind} are {curve.points}",
                    legal="pairs of bytes and seconds that ascend",
                )
        if not self.flops:
            raise FileError(f"machine {self.name} has no flops", legal='{"float32": ...}')
        self._check(rates, "more than 0", lambda value: 0 < value < math.inf)
        self._check(figures, "0 or more", lambda value: 0 <= value < math.inf)
        self._check(shares, "from 0 to less than 1", lambda value: 0 <= value < 1)

    def _check(self, figures: dict[str, float], legal: str, fits: Callable[[float], bool]) -> None:
        for name, value in figures.items():
            if not fits(value):
                raise FileError(f"machine {self.name}: {name} is {value}", legal=legal)

    def link(self, ranks: Sequence[int]) -> Link:
        """The slowest that a group of ranks, which ascend, goes through."""
        inside = ranks[0] // self.ranks_per_node == ranks[-1] // self.ranks_per_node
        return self.node if inside else self.network

    def work_seconds(
        self, kind: str, body: str, *, flops: float, nbytes: float, dtype: str
    ) -> float:
        """Of a task of a kind that calls a body, or none: as it was measured, else by its work."""
        measured = self.bodies.get(body)
        if measured is not None:
            return measured
        line = self.kinds.get(kind)
        if line is not None:
            return line(nbytes)
        return self.launch + self.roofline(flops, nbytes, dtype)

    def roofline(self, flops: float, nbytes: float, dtype: str) -> float:
        """Of so much work, bound by its operations or by the bytes that it touches."""
        rate = self.flops.get(dtype) or self.flops.get("float32") or max(self.flops.values())
        return max(flops / rate, nbytes / self.bandwidth)

    def exchange_of(
        self, kind: CommunicationKind, ranks: Sequence[int], *, brought: int
    ) -> Exchange:
        """Of a communication between ranks, from the bytes that one of them brings."""
        link, num = self.link(ranks), len(ranks)
        carried = kind.carries(brought, num)
        curve = self.exchanges.get(exchange_name(kind.name, num, across=link is not self.node))
        if curve is not None:
            # A host that computes is at it from the first byte to the last.
            latency = 0.0 if self.host_computes else curve.fixed
            return Exchange(latency, curve(carried) - latency, curve.share)
        rounds = kind.rounds(num) if link.rounds else 1
        return Exchange(link.latency * rounds, carried / link.bandwidth, link.share)


def _ascends(points: Sequence[tuple[float, float]]) -> bool:
    """Sizes do, seconds do not descend, and both are finite numbers."""
    finite = all(0 <= value < math.inf for point in points for value in point)
    steps = pairwise(points)
    return bool(points) and finite and all(a < b and s <= t for (a, s), (b, t) in steps)
