"""Long-lived processes that run torch's own variants on command; started and asked by the benchmarks."""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

import torch
import torch.distributed as dist
from initial_weights import load_weights
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch_parallel import Casting
from torch_variants import Ranked, Step, alone, make, plain
from transformer import Batch, Sizes, make_batch

from piper.bodies.leaves import batch_leaves
from piper.insight.use_of_time import length, union
from piper.plan.types import bind, plan_from_json
from piper.runtime.launch.pickles import receive, send
from piper.runtime.launch.shares import share_of
from piper.runtime.transport.null import NullTransport
from piper.runtime.worker.torch_trace import profiled
from piper.runtime.worker.worker import Worker

ANSWER_SECONDS = 300
GRACE_SECONDS = 5  # for the others, when one has failed
END_SECONDS = (10, 3)  # for all processes together, before and after a failure
BATCHES = 4  # distinct batches, used in turn


def batches(sizes: Sizes, device: torch.device | str = "cpu") -> list[Batch]:
    found = [make_batch(sizes, seed) for seed in range(BATCHES)]
    return [{k: v.to(device) for k, v in batch.items()} for batch in found]


def _mean(losses: list[float]) -> float:
    """Of the ranks that have one; a floor has none."""
    return statistics.fmean(losses) if losses else float("nan")


class TorchRanks:
    """The driver's end of some processes; `env` is what each has beside ours, and `pinned` ones have a
    core each. An answer that takes longer than `patience` seconds is a failure."""

    def __init__(
        self, num_ranks: int, *, device: str = "cpu", env: list[dict[str, str]] | None = None,
        pinned: bool = False, patience: float = ANSWER_SECONDS,
    ) -> None:  # fmt: skip
        self.patience = patience
        self.failed = False  # whether a rank has: others may wait for it for ever
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        self.folder = tempfile.TemporaryDirectory(prefix="piper-bench-")
        key = secrets.token_bytes(16)
        address = os.path.join(self.folder.name, "driver")
        cores = sorted(os.sched_getaffinity(0))
        with Listener(address, family="AF_UNIX", backlog=num_ranks, authkey=key) as listener:
            for rank in range(num_ranks):
                core = str(cores[rank % len(cores)]) if pinned else ""
                command = [
                    sys.executable,
                    __file__,
                    str(rank),
                    str(num_ranks),
                    address,
                    device,
                    core,
                ]
                more = {"OMP_NUM_THREADS": "1", "BENCH_KEY": key.hex()}
                more |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
                more |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
                more |= env[rank] if env else {}
                self.processes.append(subprocess.Popen(command, env={**os.environ, **more}))
            try:
                self._accept(listener)
            except BaseException:
                self.close()
                raise

    def _accept(self, listener: Listener) -> None:
        found: dict[int, Connection] = {}
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        deadline = time.monotonic() + 120
        while len(found) < len(self.processes):
            try:
                connection = listener.accept()
                found[receive(connection)] = connection
            except TimeoutError:
                if time.monotonic() > deadline or any(p.poll() is not None for p in self.processes):
                    raise RuntimeError("a torch rank did not start") from None
        self.connections = [found[rank] for rank in sorted(found)]

    def ask(self, name: str, *arguments: Any, ranks: list[int] | None = None) -> list[Any]:
        """All answers; an error of a rank is raised here, with its text."""
        chosen = [self.connections[r] for r in ranks] if ranks else self.connections
        for connection in chosen:
            with contextlib.suppress(ConnectionError):  # its end is seen when answers come in
                send(connection, (name, arguments))
        answers: dict[Connection, Any] = {}
        failed = ""
        deadline = time.monotonic() + self.patience
        while len(answers) < len(chosen):
            waiting = [connection for connection in chosen if connection not in answers]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                late = [self.connections.index(connection) for connection in waiting]
                failed = failed or f"torch ranks {late} did not answer {name} {arguments[:1]}"
                break
            for connection in ready:
                error, answers[connection] = self._answer(connection)
                if error is not None and not failed:  # others may wait for this one for ever
                    failed, deadline = error, time.monotonic() + GRACE_SECONDS
        if failed:
            self.failed = True
            raise RuntimeError(failed)
        return [answers[connection] for connection in chosen]

    def _answer(self, connection: Connection) -> tuple[str | None, Any]:
        try:
            return receive(connection)
        except (EOFError, ConnectionError):
            return f"torch rank {self.connections.index(connection)} has ended", None

    def steps(
        self, name: str, num: int, ranks: list[int] | None = None
    ) -> tuple[list[float], list[float]]:
        """The losses of some steps, and each one's time on the slowest rank in milliseconds."""
        answers = self.ask("steps", name, num, ranks=ranks)
        by_step = zip(*(losses for losses, _ in answers), strict=True)
        losses = [_mean([x for x in step if x is not None]) for step in by_step]
        times = zip(*(times for _, times in answers), strict=True)
        return losses, [max(step) for step in times]

    def close(self) -> None:
        for connection in self.connections:
            with contextlib.suppress(OSError):
                send(connection, ("close", ()))
            connection.close()
        seconds = END_SECONDS[self.failed] if self.connections else 0.1
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.folder.cleanup()

    def __enter__(self) -> TorchRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Rank:
    """One process; its methods are what the driver can ask."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.variants: dict[str, Step] = {}
        self.taken: dict[str, int] = {}
        self.compiles = False
        self.left = 0  # bytes of the device when its peak was last asked for

    def sizes(self, sizes: Mapping[str, Any], weights: str) -> None:
        self.size = Sizes(**sizes)
        self.weights = weights
        self.batches = batches(self.size, self.device)

    def ranked(self, compiled: bool) -> Ranked:
        self.compiles |= compiled
        load = lambda module: load_weights(module, self.weights)  # noqa: E731
        return Ranked(self.size, load, self.device, compiled=compiled)

    def make(self, name: str, compiled: bool) -> None:
        self._keep(name, make(name, self.ranked(compiled)))

    def plain(self, name: str, compiled: bool, regime: str = "") -> None:
        ranked = self.ranked(compiled)
        wrap = (lambda module: Casting(module, ranked, regime)) if regime else None
        self._keep(name, plain(ranked, wrap))

    def alone(self, name: str, stages: list[list[int]], total: int, microbatches: int) -> None:
        self._keep(name, alone(stages[dist.get_rank()], total, microbatches, self.ranked(False)))

    def worker(self, name: str, plan: bytes, bodies: Mapping[str, str]) -> None:
        """The bodies of Piper's rank, with a transport that moves nothing."""
        loaded, rank = plan_from_json(plan), dist.get_rank()
        data_rank = bind(loaded, rank).data_rank
        worker = Worker(loaded, rank, bodies=bodies, transport=NullTransport())

        def one(batch: Batch) -> float:
            return worker.step(share_of(loaded, batch_leaves(batch), data_rank))["loss"]

        self._keep(name, one)

    def _keep(self, name: str, step: Step) -> None:
        self.variants[name], self.taken[name] = step, 0

    def steps(self, name: str, num: int) -> tuple[list[float | None], list[float]]:
        losses, times = [], []
        for _ in range(num):
            batch = self.batches[self.taken[name] % BATCHES]
            self.taken[name] += 1
            start = time.perf_counter()
            losses.append(self.variants[name](batch))
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return losses, times

    def trace(self, name: str, folder: str) -> None:
        """One step under the profiler; a trace per rank."""
        with profiled(folder, dist.get_rank()):
            self.steps(name, 1)

    def exposed(self, name: str) -> dict[str, float]:
        """What NCCL's kernels take in a step, with what they wait for, and for how much of that no other
        kernel runs; ms."""
        if self.device.type != "cuda":
            return {}
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.steps(name, 1)
        talking: list[tuple[float, float]] = []
        computing: list[tuple[float, float]] = []
        for event in found.events():
            if event.device_type == DeviceType.CUDA:
                times = (event.time_range.start, event.time_range.end)
                (talking if "nccl" in event.name.lower() else computing).append(times)
        busy = length(union(computing))
        return {
            "communication_ms": length(union(talking)) / 1e3,
            "exposed_ms": (length(union([*talking, *computing])) - busy) / 1e3,
        }

    def memory(self) -> float:
        """Peak bytes of the device since the last time it was asked, beside what was there then: torch
        keeps a little of variants that were dropped. 0 on a CPU."""
        if self.device.type != "cuda":
            return 0.0
        peak = torch.cuda.max_memory_allocated() - self.left
        self.left = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return float(peak)

    def drop(self, name: str) -> None:
        del self.variants[name], self.taken[name]
        if self.compiles and not self.variants:
            torch.compiler.reset()  # of one function it keeps a few versions only
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _load_optimizer() -> None:
    """A kernel that is loaded beside communication may wait for it, and it for the kernel."""
    for dtype in (torch.float32, torch.bfloat16):
        param = torch.zeros(1, dtype=dtype, device="cuda", requires_grad=True)
        param.grad = torch.zeros_like(param)
        torch.optim.AdamW([param], fused=True).step()


def main(rank: int, num_ranks: int, address: str, device: str, core: str) -> None:
    if core:
        os.sched_setaffinity(0, {int(core)})
    torch.set_num_threads(1)
    connection = Client(address, authkey=bytes.fromhex(os.environ.pop("BENCH_KEY")))
    send(connection, rank)
    if device == "cuda":
        torch.cuda.set_device(0)
        _load_optimizer()
    store = f"file://{os.path.dirname(address)}/store"
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=num_ranks)
    found = Rank(device)
    try:
        while True:
            name, arguments = receive(connection)
            if name == "close":
                break
            try:
                answer = (None, getattr(found, name)(*arguments))
            except Exception as error:
                answer = (f"{type(error).__name__}: {error}\n{traceback.format_exc()}", None)
            send(connection, answer)
    except (EOFError, ConnectionError, KeyboardInterrupt):
        pass  # the driver is gone
    finally:
        dist.destroy_process_group()


def start(ranks: TorchRanks, sizes: Sizes, weights: str) -> None:
    """Tell all ranks the model and the file of its initial weights."""
    ranks.ask("sizes", asdict(sizes), weights)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5])
