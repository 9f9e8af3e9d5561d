"""Link times: what communication of each kind and size takes between the ranks that are there, and what
it takes away from computation meanwhile. All ranks measure together."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.cost.exchange_times import ExchangeTime, LinkTimes, usual
from piper.ir.communication import communication
from piper.runtime.transport.distributed import all_gather_single, reduce_scatter_single

SIZES = {
    "cpu": (4 << 10, 64 << 10, 1 << 20, 8 << 20),
    "cuda": (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20),
}
ROUNDS = 12
BESIDE = {"cpu": 1 << 20, "cuda": 64 << 20}  # bytes of communication that is put beside computation
BESIDES = {"cpu": 8, "cuda": 1}  # of them, one after the other
ABREAST = 8 << 20  # bytes of each of two communications at once
SLICES = 20
BEFORE = 10  # slices of computation
SLICE = {"cpu": 192, "cuda": 1024}  # rows of the matrices whose products are computed beside it
LONGEST = 3  # times what it takes alone, that communication may take beside computation
MOST = 0.95  # of a device, that communication may take


Groups = Sequence[Sequence[int]]  # that do not overlap, and have the same size


def measure_links(device: torch.device, partitions: Sequence[Groups]) -> LinkTimes:
    """Messages, and collectives in each of these partitions of the ranks."""
    rank, num = dist.get_rank(), dist.get_world_size()
    if num == 1:
        return LinkTimes()
    hosts: list[Any] = [None] * num
    dist.all_gather_object(hosts, socket.gethostname())
    found: list[ExchangeTime] = []
    near = [r for r in range(1, num) if hosts[r] == hosts[0]][:1]
    far = [r for r in range(1, num) if hosts[r] != hosts[0]][:1]
    for peer in (*near, *far):
        pair = _group((0, peer), device)
        for nbytes in SIZES[device.type]:
            seconds = _message(nbytes, rank, peer, pair, device)
            found.append(ExchangeTime("send", 2, peer in far, nbytes, seconds))
        _end(pair)
    shares: dict[str, float] = {}
    lanes, issue = 1.0, _issue(device)
    for groups in sorted(partitions, key=lambda groups: -len(groups[0])):
        made = [_group(ranks, device) for ranks in groups]
        (mine,) = (group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
        size = len(groups[0])
        across = any(len({hosts[r] for r in ranks}) > 1 for ranks in groups)
        for nbytes in SIZES[device.type]:
            for kind, call in _collectives(nbytes, mine, device).items():
                carried = communication(kind).carries(_brought(kind, nbytes, size), size)
                seconds = _often(partial(call, False), rank in groups[0], len(groups), device)
                found.append(ExchangeTime(kind, size, across, carried, seconds))
        if not shares:
            shares, lanes = _shares(mine, device, issue), _lanes(mine, groups, device)
        for group in made:
            _end(group)
    per_node = hosts.count(hosts[0]) if far else None
    return LinkTimes(tuple(found), shares, issue, lanes, per_node)


def _group(ranks: Sequence[int], device: torch.device) -> Any:
    """Of the kind that plans use; all ranks make all groups."""
    group = dist.new_group(list(ranks), backend="nccl" if device.type == "cuda" else "gloo")
    if device.type == "cuda" and dist.get_rank() in ranks:
        dist.all_reduce(torch.zeros(1, device=device), group=group)  # connects them
    return group


def _end(group: Any) -> None:
    if group != dist.GroupMember.NON_GROUP_MEMBER:
        dist.destroy_process_group(group)


def _brought(kind: str, nbytes: int, num: int) -> int:
    """By each rank, where the whole has so many bytes."""
    return nbytes // num if communication(kind).gathers else nbytes


def _collectives(nbytes: int, group: Any, device: torch.device) -> dict[str, Callable[[bool], Any]]:
    """Each starts one, and with True leaves it under way."""
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

    def starting(call: Callable[..., Any]) -> Callable[[bool], Any]:
        return lambda beside: call(group=group, async_op=beside)

    return {kind: starting(call) for kind, call in calls.items()}


def _often(call: Callable[[], Any], first: bool, groups: int, device: torch.device) -> float:
    """Of groups that sometimes all communicate at once and sometimes do not: half way between what it
    takes all of them and the first one alone."""
    together = _timed(call, device)
    if groups == 1:
        return together
    return (together + _timed(call, device, takes_part=first)) / 2


def _timed(call: Callable[[], Any], device: torch.device, *, takes_part: bool = True) -> float:
    """As it comes in a step, after some computation. Whoever comes last sees what it takes alone; a
    rank that does not take part is there all the same."""
    compute = _slice(device)
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        times.append(_after(compute, call, device) if takes_part else inf)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, times[2:])
    return usual([min(column) for column in zip(*every, strict=True)])


def _after(compute: Callable[[], Any], call: Callable[[], Any], device: torch.device) -> float:
    """Seconds of a call behind some computation. A device is not done with that while the host starts
    the call."""
    if device.type == "cuda":
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(BEFORE):
            compute()
        first.record()
        call()
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) / 1e3
    _sliced(compute, BEFORE, device)
    begin = perf_counter()
    call()
    return perf_counter() - begin


def _message(nbytes: int, rank: int, peer: int, group: Any, device: torch.device) -> float:
    """Half the time there and back. On a GPU a message is a broadcast of two ranks, as in a plan."""
    tensor = torch.zeros(nbytes // 4, device=device)

    def there_and_back() -> None:
        for sender in (0, peer):
            if device.type == "cuda":
                dist.broadcast(tensor, sender, group=group)
            elif rank == sender:
                dist.send(tensor, peer - rank)  # the other one
            else:
                dist.recv(tensor, sender)

    return _timed(there_and_back, device, takes_part=rank in (0, peer)) / 2


def _issue(device: torch.device) -> float:
    """What a host needs to start a communication and to end one that is over."""
    tensor = torch.zeros(1024, device=device)
    times = []
    for _ in range(2 * ROUNDS):
        dist.barrier()
        begin = perf_counter()
        work = dist.all_reduce(tensor, async_op=True)
        issued = perf_counter()
        work.wait()
        _settle(device)
        over = perf_counter()
        work.wait()
        times.append(issued - begin + perf_counter() - over)
    return median(times)


def _shares(group: Any, device: torch.device, issue: float) -> dict[str, float]:
    """What each kind takes of the device from computation that goes on beside it: the seconds that it
    costs there, of those that it takes alone."""
    compute = _slice(device)
    shares = {}
    for kind, call in _collectives(BESIDE[device.type], group, device).items():
        alone = _timed(partial(call, False), device)
        cost = _cost_beside(partial(call, True), compute, device, issue, LONGEST * alone)
        shares[kind] = cost / alone
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, list(shares.values()))
    means = [sum(column) / len(every) for column in zip(*every, strict=True)]
    kept = {kind: min(max(mean, 0.0), MOST) for kind, mean in zip(shares, means, strict=True)}
    return kept | {"send": kept["all_to_all"] / 2}  # which sends and receives


def _lanes(group: Any, groups: Groups, device: torch.device) -> float:
    """How many exchanges at once are as fast as one alone, as two of them show."""
    others = [_group(ranks, device) for ranks in groups]
    (other,) = (each for each in others if each != dist.GroupMember.NON_GROUP_MEMBER)
    calls = [_collectives(ABREAST, each, device)["all_reduce"] for each in (group, other)]

    def both() -> None:
        for work in [call(True) for call in calls]:
            work.wait()

    alone, together = _timed(partial(calls[0], False), device), _timed(both, device)
    for each in others:
        _end(each)
    return min(max(2 * alone / together, 1.0), 2.0)


def _slice(device: torch.device) -> Callable[[], Tensor]:
    a = torch.randn(SLICE[device.type], SLICE[device.type], device=device)
    return lambda: a @ a


def _cost_beside(
    call: Callable[[], Any],
    compute: Callable[[], Tensor],
    device: torch.device,
    issue: float,
    longest: float,
) -> float:
    """Seconds that computation loses to one communication. Gloo does not say when a reduce_scatter is
    over: it is not awaited for `longest`."""
    times = []
    for _ in range(ROUNDS):
        alone = _sliced(compute, SLICES, device) / SLICES
        most = max(int(longest / alone), 1)
        dist.barrier()
        begin, slices = perf_counter(), 0
        for _ in range(BESIDES[device.type]):
            work, last = call(), slices + most
            while slices < last and not work.is_completed():
                compute()
                slices += 1
            work.wait()
        _settle(device)
        times.append((perf_counter() - begin - slices * alone) / BESIDES[device.type] - issue)
    return median(times)


def _sliced(compute: Callable[[], Tensor], times: int, device: torch.device) -> float:
    _settle(device)
    begin = perf_counter()
    for _ in range(times):
        compute()
    _settle(device)
    return perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
