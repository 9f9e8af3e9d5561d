"""Rewrites: small programs in, what each directive does to them out, for docstrings and pages."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import piper
from piper import Schedule, where
from piper.compiler.stage_graphs import Stages
from piper.ir.form.graph_diff import graph_diff

Steps = Callable[[Schedule], Iterator[None]]  # what comes before `yield` sets the stage


class Dense(nn.Module):
    """Two layers, of which each is a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            x = self.a(x)
        with piper.annotate("PP"):
            return self.b(x)


class One(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with piper.annotate("PP"):
            return self.a(x)


class Untagged(Dense):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


class Experts(nn.Module):
    """Two experts whose rows come sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = F.one_hot((x[:, 0] > 0).long(), 2).sum(0)
        with piper.annotate("EP"):
            return piper.grouped_mm(x, self.w, counts)


def mean_square(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).square().mean()


@cache
def program_of(model: type[nn.Module]) -> piper.Program:
    return piper.trace(model, {"x": torch.ones(8, 4)}, mean_square)


def mesh(s: Schedule) -> Iterator[None]:
    yield
    s.mesh(pp=2, dp=2)


def stream(s: Schedule) -> Iterator[None]:
    yield
    s.stream("dp", priority="high")


def cut(s: Schedule) -> Iterator[None]:
    yield
    s.cut("PP", 2)


def place(s: Schedule) -> Iterator[None]:
    mesh = s.mesh(pp=2)
    yield
    s.place(where(PP=0), mesh.at(pp=0))


def replicate(s: Schedule) -> Iterator[None]:
    s.mesh(dp=2)
    yield
    s.replicate(where(), over="dp", zero=2)


def shard(s: Schedule) -> Iterator[None]:
    s.mesh(ep=2)
    yield
    s.shard(where(EP=0), over="ep")


def shard_tensor(s: Schedule) -> Iterator[None]:
    s.mesh(tp=2)
    yield
    s.shard_tensor(where(), over="tp", params={"a.weight": 0, "b.weight": 1})


def split(s: Schedule) -> Iterator[None]:
    yield
    s.split(where(), "MB", 2)


def order(s: Schedule) -> Iterator[None]:
    s.split(where(), "MB", 2)
    yield
    s.order([where(PP=0, MB=0, phase="BI"), where(PP=0, MB=1, phase="F"), where(PP=0, phase="BW")])


def order_table(s: Schedule) -> Iterator[None]:
    s.mesh(pp=2)
    s.split(where(), "MB", 2)
    yield
    s.order(piper.schedules.gpipe(num_ranks=2, num_microbatches=2))


def recompute(s: Schedule) -> Iterator[None]:
    yield
    s.recompute(where(PP=0), keep="expensive")


# Per directive and form (`order` has two): the model, and what is done to it.
CASES: dict[str, list[tuple[type[nn.Module], Steps]]] = {
    "mesh": [(Dense, mesh)],
    "stream": [(Dense, stream)],
    "cut": [(Untagged, cut)],
    "place": [(Dense, place)],
    "replicate": [(Dense, replicate)],
    "shard": [(Experts, shard)],
    "shard_tensor": [(Dense, shard_tensor)],
    "split": [(One, split)],
    "order": [(Dense, order), (Dense, order_table)],
    "recompute": [(Dense, recompute)],
}


def rewrite_text(model: type[nn.Module], steps: Steps) -> str:
    """The directive, and all that it changes in the graph."""
    program = program_of(model)
    s = Schedule(program.graph, stages=Stages(program.source, None))
    running = steps(s)
    next(running)
    before = s.graph
    next(running, None)
    record = s.history[-1]
    return f"{record}\n# {record.effect}\n\n{graph_diff(before, s.graph)}".rstrip()


@cache
def rewrites_of(kind: str) -> list[str]:
    """The text of each form of a directive."""
    return [rewrite_text(model, steps) for model, steps in CASES[kind]]


def in_docstring(source: str, texts: list[str]) -> str:
    """The source of a directive with these texts in the Rewrite sections of its docstring."""
    remaining = iter(texts)

    def section(match: re.Match[str]) -> str:
        return match[1] + textwrap.indent(next(remaining), " " * 8) + "\n\n" + match[2]

    return re.sub(r"(^    Rewrite:\n).*?^(    Example:)", section, source, flags=re.M | re.S)
