"""A script for torchrun with two ranks that say they are of two machines, and one's clock is ahead."""

import math
import time

import torch
import torch.distributed as dist

from piper.plan.tasks import Comm
from piper.plan.types import bind
from piper.runtime.record.clocks import common_tie
from piper.runtime.transport.arrivals import seeing_arrivals
from piper.runtime.transport.distributed import Communicators, DistributedTransport
from piper.runtime.transport.transport import Exchange
from tests.strategies import strategy_of
from tests.zoo import program_of

AHEAD = 7_000_000_000
PAUSE = 0.3


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tie = common_tie(f"machine {rank}", lambda: time.perf_counter_ns() + rank * AHEAD)
    off = abs(tie.offset + rank * AHEAD)
    print(f"rank {rank} tie: {off <= tie.error < 50_000_000} {off} {tie.error}", flush=True)
    same = common_tie("one machine")
    print(f"rank {rank} same: {same.offset == 0 and same.error < 1_000_000}", flush=True)
    _message(rank)
    dist.destroy_process_group()


def _message(rank: int) -> None:
    """A receive is seen to be complete without being finished, and not before."""
    plan = program_of("moe").apply(strategy_of("pp2", "1f1b")).lower().plan
    transport = DistributedTransport(Communicators(torch.device("cpu")), plan)
    me = bind(plan, rank)
    kind = ("send", "recv")[rank]
    task = next(t for t in me.tasks if isinstance(t, Comm) and t.kind == kind and "%x" in t.key)
    outputs = (me.slots[task.target],) if rank else ()
    exchange = Exchange(task, plan.streams[task.stream], rank, me.groups[task.group], outputs)
    begin = seeing_arrivals(transport).start
    slot = me.slots[task.target if rank else task.source]
    sent = torch.arange(math.prod(slot.shape), dtype=getattr(torch, slot.dtype)).view(slot.shape)
    dist.barrier()
    if rank == 0:
        time.sleep(PAUSE)
        begin(exchange, sent, None, None).finish()
        return
    pending = begin(exchange, None, None, None)
    early = pending.ready()
    deadline = time.monotonic() + 30
    while not pending.ready() and time.monotonic() < deadline:
        time.sleep(0.001)
    late = pending.ready()
    (found,) = pending.finish()
    print(f"rank 1 message: {not early and late and torch.equal(found, sent)}", flush=True)


if __name__ == "__main__":
    main()
