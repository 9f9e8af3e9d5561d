"""What communication and computation of ranks that share one GPU cost each other: rates of exchanges by
how many communicators carry them at once, computation beside reductions by how many multiprocessors each
of them leaves to the other, and whether streams wait for each other.

    python benchmarks/contention.py [--connections 2] [--sections rates,beside,queues]

`--connections` is CUDA_DEVICE_MAX_CONNECTIONS of every rank; otherwise it is that of Piper's launcher.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from piper.runtime.launch.mps import Mps
from piper.runtime.order.multiprocessors import Multiprocessors

RANKS = 4
PAIRS = ((0, 1), (2, 3))
MIB = 1 << 20
SECTIONS = ("rates", "beside", "queues")
CTAS = (None, 1, 2, 4)  # that NCCL may take
LEFT_FREE = (0, 2, 4, 8)  # multiprocessors, by products
SLEEP = 5_000_000  # cycles
Exchange = Callable[[Tensor, Tensor, Any], Any]


def _reduce_scatter(whole: Tensor, part: Tensor, group: Any) -> None:
    dist.reduce_scatter_tensor(part, whole, group=group)


def _all_gather(whole: Tensor, part: Tensor, group: Any) -> None:
    dist.all_gather_into_tensor(whole, part, group=group)


def _all_reduce(whole: Tensor, part: Tensor, group: Any) -> None:
    dist.all_reduce(whole, group=group)


def _all_to_all(whole: Tensor, part: Tensor, group: Any) -> None:
    dist.all_to_all_single(torch.empty_like(whole), whole, group=group)


EXCHANGES: dict[str, Exchange] = {
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}


def tell(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def groups(*, whole: bool, num: int, ctas: int | None = None) -> list[Any]:
    """Communicators of this rank: with all ranks, or with the other one of its pair."""
    mine = []
    for _ in range(num):
        for ranks in (tuple(range(RANKS)),) if whole else PAIRS:
            options = dist.ProcessGroupNCCL.Options()
            if ctas:
                options.config.min_ctas, options.config.max_ctas = 1, ctas
            made = dist.new_group(list(ranks), backend="nccl", pg_options=options)
            if dist.get_rank() in ranks:
                dist.all_reduce(torch.zeros(1, device="cuda"), group=made)
                mine.append(made)
    torch.cuda.synchronize()
    return mine


def timed(call: Callable[[], None], rounds: int) -> float:
    """Seconds of a call in the middle of some, on the slowest rank."""
    times = []
    for _ in range(rounds + 1):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    found = torch.tensor(statistics.median(times[1:]), device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def rates() -> None:
    tell("| exchange | group | MiB | communicators | ms | GB/s that a rank sends |")
    tell("|---|---|---|---|---|---|")
    for whole in (False, True):
        made = groups(whole=whole, num=4)
        size = dist.get_world_size(made[0])
        for name, exchange in EXCHANGES.items():
            for mib in (16, 128):
                for num in (1, 2, 4):
                    _rate(name, exchange, mib, made[:num], size)


def _rate(name: str, exchange: Exchange, mib: int, made: list[Any], size: int) -> None:
    """One exchange, cut over some communicators on streams of their own."""
    num = len(made)
    wholes = torch.ones(mib * MIB // 4, device="cuda").chunk(num)
    parts = [torch.ones(w.numel() // size, device="cuda") for w in wholes]
    streams = [torch.cuda.Stream() for _ in made]

    def call() -> None:
        for stream, group, whole, part in zip(streams, made, wholes, parts, strict=True):
            with torch.cuda.stream(stream):
                exchange(whole, part, group)

    seconds = timed(call, 3)
    sent = mib * MIB * (size - 1) / size * (2 if name == "all_reduce" else 1)
    tell(
        f"| {name} | {size} ranks | {mib} | {num} | {1e3 * seconds:.1f} | {sent / seconds / 1e9:.2f} |"
    )


def beside() -> None:
    """Computation while reductions go on, by what products leave free and what NCCL may take."""
    room = Multiprocessors(torch.device("cuda"))
    x, y = (torch.randn(4096, n, device="cuda", dtype=torch.bfloat16) for n in (2048, 8192))
    weight = torch.randn(2048, 8192, device="cuda", dtype=torch.bfloat16)
    heads = torch.randn(4, 16, 1024, 128, device="cuda", dtype=torch.bfloat16)
    work: dict[str, tuple[int, Callable[[], Any]]] = {
        "product": (60, lambda: torch.mm(x, weight)),
        "its weight's gradient": (60, lambda: torch.mm(x.t(), y)),
        "silu": (400, lambda: torch.nn.functional.silu(y)),
        "attention": (200, lambda: _attention(heads)),
    }
    made = {ctas: groups(whole=False, num=1, ctas=ctas)[0] for ctas in CTAS}
    tell("| work | left free | alone, ms | " + " | ".join(map(_shown, CTAS)) + " |")
    tell("|---|---|---|" + "---|" * len(CTAS))
    for name, (num, call) in work.items():
        for left in LEFT_FREE:
            room.leave(left)
            alone, _ = _together(call, num, None)
            cells = [f"{one:.0f} ({other:.0f})" for one, other in (
                _together(call, num, group) for group in made.values())]  # fmt: skip
            tell(f"| {num} x {name} | {left} | {alone:.0f} | {' | '.join(cells)} |")
    room.leave(0)


def _attention(heads: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)


def _shown(ctas: int | None) -> str:
    return f"beside, NCCL with {ctas or 'any number of'} CTAs (reductions), ms"


def _together(call: Callable[[], Any], num: int, group: Any) -> tuple[float, float]:
    """Milliseconds of computation, and of seven reductions of 64 MiB that begin with it."""
    whole = torch.ones(64 * MIB // 4, device="cuda")
    part = torch.ones(whole.numel() // 2, device="cuda")
    computing, talking = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    for _ in range(2):
        dist.barrier()
        torch.cuda.synchronize()
        if group is not None:
            with torch.cuda.stream(talking):
                marks[0].record()
                for _ in range(7):
                    _reduce_scatter(whole, part, group)
                marks[1].record()
        with torch.cuda.stream(computing):
            marks[2].record()
            for _ in range(num):
                call()
            marks[3].record()
        torch.cuda.synchronize()
    moved = marks[0].elapsed_time(marks[1]) if group is not None else 0.0
    return marks[2].elapsed_time(marks[3]), moved


def queues() -> None:
    """A message and a gather on streams of their own, issued behind four reductions on another one, when
    some computation is over: do they wait for reductions that they have nothing to do with?"""
    first, second, third = groups(whole=False, num=3)
    whole = torch.ones(64 * MIB // 4, device="cuda")
    part = torch.ones(whole.numel() // 2, device="cuda")
    small = torch.ones(4 * MIB // 4, device="cuda")
    half = small[: small.numel() // 2]
    computing, reducing, sending, gathering = (torch.cuda.Stream() for _ in range(4))
    sender = dist.get_rank() // 2 * 2
    for _ in range(2):  # kernels are loaded by the first
        dist.barrier()
        torch.cuda.synchronize()
        spans: list[tuple[str, Any, Any]] = []

        def span(name: str, stream: Any, call: Callable[[], Any], after: Any = None) -> Any:
            with torch.cuda.stream(stream):
                if after is not None:
                    stream.wait_event(after)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                call()
                end.record()
            spans.append((name, begin, end))  # noqa: B023
            return end

        for _ in range(4):
            done = span("compute", computing, lambda: torch.cuda._sleep(SLEEP))
            span("reduce", reducing, lambda: _reduce_scatter(whole, part, first), done)
        done = span("compute", computing, lambda: torch.cuda._sleep(SLEEP))
        span("send", sending, lambda: dist.broadcast(small, sender, group=second), done)
        span("gather", gathering, lambda: _all_gather(small, half, third), done)
        torch.cuda.synchronize()
    begun = spans[0][1]
    for name, begin, end in spans:
        tell(f"{name}: {begun.elapsed_time(begin):.1f} to {begun.elapsed_time(end):.1f} ms")


def rank_main(sections: list[str]) -> None:
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{os.environ['STORE']}",
        rank=int(os.environ["RANK"]),
        world_size=RANKS,
    )
    for name in sections:
        tell(f"\n## {name}\n")
        {"rates": rates, "beside": beside, "queues": queues}[name]()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, help="CUDA_DEVICE_MAX_CONNECTIONS")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    options = parser.parse_args()
    sections = options.sections.split(",")
    if "RANK" in os.environ:
        rank_main(sections)
        return
    with Mps() as mps, tempfile.TemporaryDirectory() as folder:
        found = []
        for rank in range(RANKS):
            env = {**os.environ, **mps.env(percentage=100 / RANKS), "RANK": str(rank)}
            env |= {
                "NCCL_HOSTID": f"host{rank}",
                "NCCL_SOCKET_IFNAME": "lo",
                "STORE": f"{folder}/store",
            }
            if options.connections:
                env["CUDA_DEVICE_MAX_CONNECTIONS"] = str(options.connections)
            command = [sys.executable, __file__, "--sections", options.sections]
            found.append(subprocess.Popen(command, env=env))
        try:
            codes = [process.wait() for process in found]
        finally:
            for process in found:
                with contextlib.suppress(OSError):
                    process.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
