"""Lesson 8: reading a timeline. A step is twice as long as it must be; its timeline says why.

python examples/lessons/08_remove_a_bubble.py [FOLDER for timelines]
"""

# 1. A tower whose regions were tagged by eye.
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import tower
from spans import computing
from torch import nn

import piper
from piper.observe.timeline import Timeline
from piper.strategies import parallel

WIDTH, ROWS = 2048, 65_536
nothing = torch.zeros(1).expand(ROWS, WIDTH)
batch = {"x": nothing, "y": nothing}


def model(sizes: Sequence[int]) -> nn.Module:
    """The tower with so many blocks in each region."""
    made = nn.Sequential(*(tower.Block(WIDTH) for _ in range(sum(sizes))))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    regions = [
        [str(block) for block in range(end - size, end)]
        for end, size in zip(ends, sizes, strict=True)
    ]
    return piper.tag(made, PP=regions)


# 2. Three attempts.
folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
if folder:
    folder.mkdir(exist_ok=True)


def attempt(name: str, program: piper.Program, schedule: str) -> Timeline:
    strategy = parallel(pp=4, schedule=schedule, microbatches=8)
    job = program.apply(strategy).lower(precision="bf16", machine="h100")
    timeline = job.simulate("h100", steps=1)
    shares = ", ".join(f"{share:.0%}" for share in computing(timeline))
    print(f"{name:<9} {timeline.step_seconds[0] * 1e3:.1f} ms a step, ranks compute {shares}")
    if folder:
        timeline.save(folder / f"{name}.timeline")
    return timeline


by_eye = piper.trace(lambda: model((4, 2, 1, 1)), batch, tower.step)
equal = piper.trace(lambda: model((2, 2, 2, 2)), batch, tower.step)
found = {
    "before": attempt("before", by_eye, "1f1b"),
    "balanced": attempt("balanced", equal, "1f1b"),
    "after": attempt("after", equal, "zb_h1"),
}

# 3. What is to be learned.
seconds = {name: timeline.step_seconds[0] for name, timeline in found.items()}
assert seconds["balanced"] < 0.75 * seconds["before"]
assert seconds["after"] < 0.88 * seconds["balanced"]
assert min(computing(found["before"])) < 0.3 and min(computing(found["after"])) > 0.8
