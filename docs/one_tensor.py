"""The page "One tensor through Piper": one chunk in every form it takes, printed by the code itself."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import fx, nn

import piper
from piper import Schedule, where
from piper.plan.report.plan_text import plan_to_text

MICROBATCH = "F[PP=0,MB=0]"
BEFORE = ("value first.weight ", "value %x ", "value $d.first.weight/0 ", "chunk F[PP=0]")
AFTER = (
    "value first.weight ", "value %x[MB=0] ", "value $d.first.weight/0[MB=0] ", f"chunk {MICROBATCH}",
)  # fmt: skip
BOUND = (
    "value first.weight@pp=0 ", "value %x[MB=0] ", "value $d.first.weight/0[MB=0] ",
    f"chunk {MICROBATCH}", "chunk B[PP=0,MB=0]",
)  # fmt: skip
PHYSICAL = (
    "value %x[MB=0]", "value $sum.b0@pp=0 ", "value $grad.b0@pp=0 ", "value $shard.b0@pp=0 ",
    "value $flat.b0@pp=0 ", "comm send>%x[MB=0]", "comm recv>%x[MB=0]",
    "accumulate add>B[PP=0,MB=0]", "comm scatter>$grad.b0@pp=0", "update update.b0@pp=0",
    "comm gather.b0@pp=0",
)  # fmt: skip
PLANNED = (
    MICROBATCH, "send>%x[MB=0]", "recv>%x[MB=0]", "add>B[PP=0,MB=0]", "scatter>$grad.b0@pp=0",
    "update.b0@pp=0", "gather.b0@pp=0",
)  # fmt: skip
WIDTH = 118
TEMPLATE = Path(__file__).with_name("one_tensor.in.md")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.first(x)
        with piper.annotate("PP"):
            return self.second(x)


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def strategy(s: Schedule) -> None:
    mesh = s.mesh(pp=2, dp=2)
    for stage in range(2):
        s.place(where(PP=stage), mesh.at(pp=stage))
    s.replicate(where(), over="dp", zero=1)
    s.split(where(), "MB", 2)


def page(note: str) -> str:
    """The whole page; every block is what the code prints."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 16), "y": torch.randn(8, 4)}
    program = piper.trace(Model, batch, step)
    scheduled = program.apply(strategy)
    job = scheduled.lower(optimizer=piper.adamw(lr=1e-3))
    _, traced = program.source.at(8)
    return TEMPLATE.read_text().format(
        note=note,
        traced=_code(traced.chunks[0].code.graph),
        before=_lines(program.as_text(), BEFORE),
        after=_lines(scheduled.as_text(), AFTER),
        bound=_lines(scheduled.text_after("bind"), BOUND),
        physical=_lines(scheduled.text_after("pace"), PHYSICAL),
        planned=_tasks(plan_to_text(job.plan), PLANNED),
    )


def _code(graph: fx.Graph) -> str:
    """The code of a chunk, without Dynamo's long names."""
    code = graph.python_code("self").src.strip().replace("l_self_modules_model_modules_", "")
    code = code.replace("_parameters_", "_").replace("self, ", "")
    return "\n".join(line.partition(";")[0] for line in code.splitlines())


def _lines(text: str, starts: tuple[str, ...]) -> str:
    """The lines about some nodes and Values."""
    return _shortened([line for line in text.splitlines() if line.startswith(starts)])


def _tasks(text: str, names: tuple[str, ...]) -> str:
    """The lines of some tasks: the name comes after number, stream and kind."""
    split = [(line, line.split(maxsplit=3)) for line in text.splitlines()]
    return _shortened([line for line, words in split if words[-1].startswith(names)])


def _shortened(lines: list[str]) -> str:
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines)
