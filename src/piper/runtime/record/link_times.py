"""Link times: what communication of each kind and size takes between the ranks that are there, and what
it takes away from computation meanwhile. All ranks measure together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

from piper.cost.exchange_times import ExchangeTime, LinkTimes
from piper.ir.communication import LEFT, communication
from piper.runtime.order.multiprocessors import Multiprocessors
from piper.runtime.transport.distributed import all_gather_single, reduce_scatter_single

SIZES = {
    "cpu": (4 << 10, 64 << 10, 1 << 20, 8 << 20),
    "cuda": (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20),
}
ROUNDS = 12
BEFORE = 10  # slices of computation, before communication that is timed
BESIDE = {"cpu": 4 << 20, "cuda": 64 << 20}  # bytes of communication that is put beside computation
ABREAST = 8 << 20  # bytes of each of two communications at once
SLICE = {"cpu": (192, torch.float32), "cuda": (2048, torch.bfloat16)}  # square matrices
AT_ONCE = 2 / 3  # of the time that one group communicates, all of its kind do
LONGER = 2  # times what communication takes alone, that computation beside it takes
MOST = 0.95  # of a device, that communication may take

Groups = Sequence[Sequence[int]]  # of ranks, that do not overlap, and have the same size
Call = Callable[[bool], Any]  # starts a communication, and with True leaves it under way
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def measure_links(device: torch.device, wanted: Sequence[Groups]) -> LinkTimes:
    """Messages, and collectives in each of these sets of groups; all ranks measure together, also those
    that are in no group."""
    num = dist.get_world_size()
    if num == 1:
        return LinkTimes()
    hosts: list[Any] = [None] * num
    dist.all_gather_object(hosts, socket.gethostname())
    found: list[ExchangeTime] = []
    shares: dict[str, float] = {}
    issue = lanes = 0.0
    for across in (False, True):
        pairs = _pairs(hosts, across=across)
        if pairs:
            with _member_of(pairs, device) as group:
                found += _messages(pairs, group, device, across=across)
                if not shares:
                    call = _there_and_back(BESIDE[device.type], pairs, group, device)
                    shares["send"] = _share(call, pairs, device)
                issue = _issue(group, device) or issue  # 0 on a rank that is in no pair
    for groups in sorted(wanted, key=lambda groups: -len(groups[0])):
        for across in (False, True):
            some = [ranks for ranks in groups if (len({hosts[r] for r in ranks}) > 1) == across]
            if not some:
                continue
            with _member_of(some, device) as group:
                found += _exchanges(some, group, device, across=across)
                if not lanes:
                    calls = _collectives(BESIDE[device.type], group, device)
                    shares |= {kind: _share(call, some, device) for kind, call in calls.items()}
                    lanes = _lanes(group, some, device)
    per_node = hosts.count(hosts[0]) if len(set(hosts)) > 1 else None
    return LinkTimes(tuple(found), shares, issue, lanes or 1.0, per_node)


def _messages(
    pairs: Groups, group: Any, device: torch.device, *, across: bool
) -> Iterator[ExchangeTime]:
    for nbytes in SIZES[device.type]:
        seconds = _often(_there_and_back(nbytes, pairs, group, device), pairs, device) / 2
        yield ExchangeTime("send", 2, across, nbytes, seconds)


def _exchanges(
    groups: Groups, group: Any, device: torch.device, *, across: bool
) -> Iterator[ExchangeTime]:
    size = len(groups[0])
    for nbytes in SIZES[device.type]:
        for kind, call in _collectives(nbytes, group, device).items():
            carried = communication(kind).carries(_brought(kind, nbytes, size), size)
            yield ExchangeTime(kind, size, across, carried, _often(call, groups, device))


def _pairs(hosts: Sequence[str], *, across: bool) -> list[tuple[int, ...]]:
    """Of ranks on one host or on two, none of them twice."""
    free = list(range(len(hosts)))
    pairs: list[tuple[int, ...]] = []
    while free:
        one = free.pop(0)
        other = next((r for r in free if (hosts[r] != hosts[one]) == across), None)
        if other is not None:
            free.remove(other)
            pairs.append((one, other))
    return pairs


@contextmanager
def _member_of(groups: Groups, device: torch.device) -> Iterator[Any]:
    """The process group of this rank, of the kind that plans use, or None; all ranks make all groups."""
    mine = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend="nccl" if device.type == "cuda" else "gloo")
        if dist.get_rank() in ranks:
            mine = group
            if device.type == "cuda":
                dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects them
    try:
        yield mine
    finally:
        if mine is not None:
            dist.destroy_process_group(mine)


def _brought(kind: str, nbytes: int, num: int) -> int:
    """By each rank, where the whole has so many bytes."""
    return nbytes // num if communication(kind).gathers else nbytes


def _there_and_back(nbytes: int, pairs: Groups, group: Any, device: torch.device) -> Call:
    """Two messages of a pair. On a GPU a message is a broadcast of two ranks, as in a plan."""
    tensor = torch.zeros(nbytes // 4, device=device)
    rank = dist.get_rank()
    pair = next((pair for pair in pairs if rank in pair), (rank, rank))

    def message(sender: int, receiver: int) -> Any:
        if device.type == "cuda":
            return dist.broadcast(tensor, sender, group=group, async_op=True)
        if rank == sender:
            return dist.isend(tensor, receiver, group=group)
        return dist.irecv(tensor, sender, group=group)

    def call(beside: bool) -> Any:
        works = []
        for sender, receiver in (pair, pair[::-1]):
            works.append(message(sender, receiver))
            if not beside:
                works.pop().wait()
        return _Works(works)

    return call


@dataclass(frozen=True)
class _Works:
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _collectives(nbytes: int, group: Any, device: torch.device) -> dict[str, Call]:
    """By kind; a rank without a group calls none of them."""
    if group is None:
        return dict.fromkeys(KINDS, _never)
    num = dist.get_world_size(group)
    size = nbytes // 4 // num * num
    whole = torch.zeros(size, device=device)
    other = torch.zeros(size, device=device)
    part = torch.zeros(size // num, device=device)
    calls: dict[str, Callable[..., Any]] = {
        "all_reduce": partial(dist.all_reduce, whole),
        "reduce_scatter": partial(reduce_scatter_single, part, whole),
        "all_gather": partial(all_gather_single, whole, part),
        "all_to_all": partial(dist.all_to_all_single, other, whole),
    }

    def starting(call: Callable[..., Any]) -> Call:
        return lambda beside: call(group=group, async_op=beside)

    return {kind: starting(calls[kind]) for kind in KINDS}


def _never(beside: bool) -> Any:
    raise AssertionError("this rank is in no group")


def _often(call: Call, groups: Groups, device: torch.device) -> float:
    """Of groups that mostly, but not always, communicate at once: between what it takes all of them and
    what it takes the first one alone."""
    together = _timed(partial(call, False), groups, device)
    if len(groups) == 1:
        return together
    alone = _timed(partial(call, False), groups[:1], device)
    return AT_ONCE * together + (1 - AT_ONCE) * alone


def _timed(call: Callable[[], Any], groups: Groups, device: torch.device) -> float:
    """As it comes in a step, after some computation. Of each group, whoever comes last sees what it
    takes; ranks of no group wait for the others."""
    compute = _slice(device)
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        times.append(_after(compute, call, device) if _is_in(groups) else inf)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, times[2:])
    return fmean(
        min(every[rank][number] for rank in ranks) for ranks in groups for number in range(ROUNDS)
    )


def _is_in(groups: Groups) -> bool:
    return any(dist.get_rank() in ranks for ranks in groups)


def _after(compute: Callable[[], Any], call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call behind some computation. A device is not done with that while the host starts
    the call."""
    if device.type == "cpu":
        _sliced(compute, BEFORE, device)
        begin = perf_counter()
        call()
        return perf_counter() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(BEFORE):
        compute()
    first.record()
    call()
    last.record()
    torch.cuda.synchronize(device)
    return float(first.elapsed_time(last)) / 1e3


def _issue(group: Any, device: torch.device) -> float:
    """What a host needs to start a communication and to end one that is over, on the first rank."""
    tensor = torch.zeros(1024, device=device)
    times = []
    for _ in range(2 * ROUNDS):
        dist.barrier()
        if group is None:
            continue
        begin = perf_counter()
        work = dist.all_reduce(tensor, group=group, async_op=True)
        issued = perf_counter()
        work.wait()
        _settle(device)
        over = perf_counter()
        work.wait()
        times.append(issued - begin + perf_counter() - over)
    return median(times) if times else 0.0


def _share(call: Call, groups: Groups, device: torch.device) -> float:
    """What communication takes of the device from computation that goes on beside it: the seconds that
    it costs there, of those that it takes alone. All ranks compute; all get the same."""
    alone = _timed(partial(call, False), groups, device)
    compute = _slice(device)
    num = max(int(LONGER * alone / (_sliced(compute, 2 * BEFORE, device) / (2 * BEFORE))), 1)
    costs = []
    for _ in range(ROUNDS):
        dist.barrier()
        without = _sliced(compute, num, device)
        dist.barrier()
        begin = perf_counter()
        work = call(True) if _is_in(groups) else None
        with _leaving(device):
            _sliced(compute, num, device)
        costs.append(perf_counter() - begin - without)
        if work is not None:
            work.wait()
        _settle(device)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, median(costs) / alone if _is_in(groups) else None)
    found = [each for each in every if each is not None]
    return min(max(sum(found) / len(found), 0.0), MOST)


@contextmanager
def _leaving(device: torch.device) -> Iterator[None]:
    """Products leave multiprocessors to communication, as they do in a plan."""
    if device.type == "cpu":
        yield
        return
    room = Multiprocessors(device)
    room.leave(LEFT)
    try:
        yield
    finally:
        room.leave(0)


def _lanes(group: Any, groups: Groups, device: torch.device) -> float:
    """How many exchanges at once are as fast as one alone, as two of them show."""
    with _member_of(groups, device) as other:
        calls = [_collectives(ABREAST, each, device)["all_reduce"] for each in (group, other)]

        def both() -> None:
            for work in [call(True) for call in calls]:
                work.wait()

        alone = _timed(partial(calls[0], False), groups, device)
        together = _timed(both, groups, device)
    return min(max(2 * alone / together, 1.0), 2.0)


def _slice(device: torch.device) -> Callable[[], Tensor]:
    size, dtype = SLICE[device.type]
    a = torch.randn(size, size, device=device, dtype=dtype)
    return lambda: gelu(layer_norm(a @ a, (size,)))  # about what a layer is made of


def _sliced(compute: Callable[[], Tensor], times: int, device: torch.device) -> float:
    _settle(device)
    begin = perf_counter()
    for _ in range(times):
        compute()
    _settle(device)
    return perf_counter() - begin


def _settle(device: torch.device) -> None:
    """Until the current stream is through."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
