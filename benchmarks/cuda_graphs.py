"""What CUDA graphs would gain: one stage's microbatch, compiled, launched by the host or replayed.

A stage of four layers of the benchmarks' transformer, forward and backward of one microbatch in
bfloat16, as often as a step has microbatches: called, with the host ahead of the device as in a step of
Piper; and as one graph that was captured of it. Both are timed by events of the device, in turn. The
difference is what the device waits between kernels when hosts launch them. Prints a line, and JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from shared_gpu import LARGE
from transformer import Stage

MICROBATCHES = 8


def timed(step: Callable[[], None]) -> float:
    """Milliseconds of the device for one step, all of which is queued behind a kernel that takes longer
    than the host needs to queue it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(200_000_000)  # cycles: about 100 ms
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    found = {}
    for rows in (1, LARGE.rows):
        sizes = replace(LARGE, rows=rows)
        stage = Stage(sizes, 1, 4).cuda()
        for param in stage.parameters():
            param.grad = torch.zeros_like(param)  # graphs need them to stay where they are
        x = torch.randn(rows, sizes.length, sizes.width, dtype=torch.bfloat16, device="cuda")
        x.requires_grad_()
        tangent = torch.randn_like(x)
        stage.compile()

        def one(stage: Stage = stage, x: torch.Tensor = x, tangent: torch.Tensor = tangent) -> None:
            stage(x).backward(tangent)

        def called(one: Callable[[], None] = one) -> None:
            for _ in range(MICROBATCHES):
                one()

        for _ in range(3):
            called()
        graph = captured(one)

        def replayed(graph: torch.cuda.CUDAGraph = graph) -> None:
            for _ in range(MICROBATCHES):
                graph.replay()

        times: dict[str, list[float]] = {"called": [], "replayed": []}
        for _ in range(asked.rounds):
            times["called"].append(timed(called))
            times["replayed"].append(timed(replayed))
        middle = {name: statistics.median(each) for name, each in times.items()}
        found[str(rows)] = middle | {"gain": 1 - middle["replayed"] / middle["called"]}
        print(
            f"{rows} x {sizes.length} tokens: called {middle['called']:.2f} ms, replayed "
            f"{middle['replayed']:.2f} ms, gain {found[str(rows)]['gain']:.1%}"
        )
    if asked.json:
        device = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
        Path(asked.json).write_text(json.dumps(device | {"rows": found}, indent=1))


if __name__ == "__main__":
    main()
