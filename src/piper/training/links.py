"""Links: what two processes of this machine can tell each other in a second, measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from piper.runtime.launch.signals import default_signals

SIZES = {"1 KiB": 2**10, "16 MiB": 2**24}
SECONDS = 0.3  # for each measurement
START_SECONDS = 60


def measure_links(backend: str = "gloo") -> list[dict[str, Any]]:
    """Two processes: per operation and size the microseconds of one, and the bytes moved a second."""
    with tempfile.TemporaryDirectory(prefix="piper-") as folder:
        store = os.path.join(folder, "store")
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "piper.training.links", backend, store]
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=START_SECONDS) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        lines = [line for _, errors in outputs for line in errors.splitlines() if line.strip()]
        raise RuntimeError(lines[-1] if lines else "the processes ended without a word")
    found: list[dict[str, Any]] = json.loads(outputs[0][0].splitlines()[-1])
    return found


def _main(backend: str, store: str, rank: int) -> None:
    default_signals()
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=START_SECONDS),
    )
    found = []
    for size_name, size in SIZES.items():
        tensor = torch.zeros(size // 4, device=device)
        for name, (function, times) in _operations(tensor, rank).items():
            seconds = _time(function, device) / times
            found.append(
                {
                    "link": backend,
                    "operation": name,
                    "size": size_name,
                    "microseconds": 1e6 * seconds,
                    "gigabytes_per_second": size / seconds / 1e9,
                }
            )
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(found))


def _operations(tensor: torch.Tensor, rank: int) -> dict[str, tuple[Callable[[], Any], int]]:
    """What is measured, and how often one call does it."""

    def there_and_back() -> None:
        for sender in range(2):
            if rank == sender:
                dist.send(tensor, 1 - rank)
            else:
                dist.recv(tensor, 1 - rank)

    return {"all_reduce": (lambda: dist.all_reduce(tensor), 1), "send": (there_and_back, 2)}


def _time(function: Callable[[], Any], device: torch.device) -> float:
    """Seconds of one call; both ranks make the same number of calls."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        function()
    wait()
    begun = time.perf_counter()
    function()
    wait()
    calls = torch.tensor([SECONDS / (time.perf_counter() - begun)], device=device)
    dist.all_reduce(calls, op=dist.ReduceOp.MIN)
    number = max(1, min(2000, int(calls.item())))
    begun = time.perf_counter()
    for _ in range(number):
        function()
    wait()
    return (time.perf_counter() - begun) / number


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
