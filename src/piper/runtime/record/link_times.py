"""Link times: what communication of each kind and size takes between the ranks that are there, and what
it takes away from computation meanwhile. All ranks measure together."""

from __future__ import annotations

import socket
from collections.abc import Callable
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
BUSY = 0.02  # seconds of computation that communication is put beside


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
            found.append(ExchangeTime(kind, num, bool(far), carried, _timed(call, device)))
    return LinkTimes(_slowest(found), _share(device), _issue(device))


def _sizes(kind: str, nbytes: int, num: int) -> tuple[int, int]:
    """What each rank brings, and what is left on it."""
    part = nbytes // num
    return {"reduce_scatter": (nbytes, part), "all_gather": (part, nbytes)}.get(
        kind, (nbytes, nbytes)
    )


def _collectives(nbytes: int, num: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    size = nbytes // 4 // num * num
    whole = torch.zeros(size, device=device)
    other = torch.zeros(size, device=device)
    part = torch.zeros(size // num, device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole),
        "all_gather": lambda: all_gather_single(whole, part),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
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


def _share(device: torch.device) -> float:
    """How much slower computation is beside communication that goes on all the time."""
    a = torch.randn(256, 256, device=device)
    large = torch.zeros(4 << 20, device=device)

    def compute(times: int) -> Tensor:
        found = a
        for _ in range(times):
            found = a @ a
        return found

    compute(10)
    _settle(device)
    begin = perf_counter()
    compute(100)
    _settle(device)
    times = max(int(100 * BUSY / (perf_counter() - begin)), 1)
    shares = []
    for _ in range(ROUNDS):
        alone = _computing(compute, times, device)
        dist.barrier()
        works = [dist.all_reduce(large, async_op=True) for _ in range(8)]
        beside = _computing(compute, times, device)
        for work in works:
            work.wait()
        _settle(device)
        shares.append(1 - alone / beside)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, median(shares))
    return min(max(median(found), 0.0), 0.9)


def _computing(compute: Callable[[int], Tensor], times: int, device: torch.device) -> float:
    begin = perf_counter()
    if device.type == "cuda":
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        compute(times)
        after.record()
        after.synchronize()
        return before.elapsed_time(after) / 1e3
    compute(times)
    return perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
