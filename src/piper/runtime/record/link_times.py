"""Link times: what communication of each kind and size takes between the ranks that are there, and what
it takes away from computation meanwhile. All ranks measure together."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from piper.cost.exchange_times import ExchangeTime, LinkTimes
from piper.ir.communication import communication
from piper.runtime.transport.distributed import all_gather_single, reduce_scatter_single

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
ROUNDS = 7
BESIDE = 1 << 20  # bytes of communication that is put beside computation
BESIDES = 8  # of them, one after the other
SLICES = 20
SLICE = {"cpu": 192, "cuda": 2048}  # rows of the matrices whose products are computed beside it
LONGEST = 3  # times what it takes alone, that communication may take beside computation
MOST = 0.95  # of a device, that communication may take


def measure_links(device: torch.device) -> LinkTimes:
    """Over the default group."""
    rank, num = dist.get_rank(), dist.get_world_size()
    hosts: list[Any] = [None] * num
    dist.all_gather_object(hosts, socket.gethostname())
    if num == 1:
        return LinkTimes()
    found: list[ExchangeTime] = []
    near = [r for r in range(1, num) if hosts[r] == hosts[0]][:1]
    far = [r for r in range(1, num) if hosts[r] != hosts[0]][:1]
    for nbytes in SIZES:
        for peer in (*near, *far):
            seconds = _message(nbytes, rank, peer, device)
            found.append(ExchangeTime("send", 2, peer in far, nbytes, seconds))
        for kind, call in _collectives(nbytes, num, device).items():
            facts = communication(kind)
            brought, left = _sizes(kind, nbytes, num)
            carried = facts.carries(brought, left, num)
            seconds = _timed(partial(call, False), device)
            found.append(ExchangeTime(kind, num, bool(far), carried, seconds))
    slowest, issue = _slowest(found), _issue(device)
    return LinkTimes(slowest, _shares(num, device, issue), issue)


def _sizes(kind: str, nbytes: int, num: int) -> tuple[int, int]:
    """What each rank brings, and what is left on it."""
    part = nbytes // num
    return {"reduce_scatter": (nbytes, part), "all_gather": (part, nbytes)}.get(
        kind, (nbytes, nbytes)
    )


def _collectives(nbytes: int, num: int, device: torch.device) -> dict[str, Callable[[bool], Any]]:
    """Each starts one, and with True leaves it under way."""
    size = nbytes // 4 // num * num
    whole = torch.zeros(size, device=device)
    other = torch.zeros(size, device=device)
    part = torch.zeros(size // num, device=device)
    return {
        "all_reduce": lambda beside: dist.all_reduce(whole, async_op=beside),
        "reduce_scatter": lambda beside: reduce_scatter_single(part, whole, async_op=beside),
        "all_gather": lambda beside: all_gather_single(whole, part, async_op=beside),
        "all_to_all": lambda beside: dist.all_to_all_single(other, whole, async_op=beside),
    }


def _timed(call: Callable[[], Any], device: torch.device) -> float:
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        begin = perf_counter()
        call()
        _settle(device)
        times.append(perf_counter() - begin)
    return median(times[2:])


def _message(nbytes: int, rank: int, peer: int, device: torch.device) -> float:
    """Half the time there and back."""
    tensor = torch.zeros(nbytes // 4, device=device)
    times = []
    for _ in range(ROUNDS + 2):
        dist.barrier()
        begin = perf_counter()
        if rank == 0:
            dist.send(tensor, peer)
            dist.recv(tensor, peer)
        elif rank == peer:
            dist.recv(tensor, 0)
            dist.send(tensor, 0)
        _settle(device)
        times.append((perf_counter() - begin) / 2)
    return median(times[2:])


def _slowest(found: list[ExchangeTime]) -> tuple[ExchangeTime, ...]:
    """As the slowest rank has seen each; all ranks get the same."""
    seconds = torch.tensor([each.seconds for each in found], dtype=torch.float64)
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, seconds.tolist())
    worst = [max(column) for column in zip(*times, strict=True)]
    return tuple(
        msgspec.structs.replace(each, seconds=seconds)
        for each, seconds in zip(found, worst, strict=True)
    )


def _issue(device: torch.device) -> float:
    """What a host needs to start a communication and to end one that is over."""
    tensor = torch.zeros(1024, device=device)
    times = []
    for _ in range(4 * ROUNDS):
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


def _shares(num: int, device: torch.device, issue: float) -> dict[str, float]:
    """What each kind takes of the device from computation that goes on beside it: the seconds that it
    costs there, of those that it takes alone."""
    compute = _slice(device)
    shares = {}
    for kind, call in _collectives(BESIDE, num, device).items():
        alone = _timed(partial(call, False), device)
        cost = _cost_beside(partial(call, True), compute, device, issue, LONGEST * alone)
        shares[kind] = cost / alone
    every: list[Any] = [None] * num
    dist.all_gather_object(every, list(shares.values()))
    means = [sum(column) / num for column in zip(*every, strict=True)]
    kept = {kind: min(max(mean, 0.0), MOST) for kind, mean in zip(shares, means, strict=True)}
    return kept | {"send": kept["all_to_all"] / 2}  # which sends and receives


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
        for _ in range(BESIDES):
            work, last = call(), slices + most
            while slices < last and not work.is_completed():
                compute()
                slices += 1
            work.wait()
        _settle(device)
        times.append((perf_counter() - begin - slices * alone) / BESIDES - issue)
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
