"""The matrix of cut tensors: ways to cut x models x schedules x ZeRO levels, every pair of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any
from zlib import crc32

import torch

import piper
from piper.api.job import Job
from piper.api.program import Program
from piper.strategies import parallel
from piper.training.precision import doubled, doubled_model
from piper.training.rounding import rounding
from piper.training.verdict import lift_program
from piper.training.verify import Errors, Trained, compare, train_one_device
from tests import tensor_zoo
from tests.matrix import covering
from tests.zoo import ADAMW
from tests.zoo_hf import VOCABULARY, ZOO

WAYS: Mapping[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp2 sp": {"tp": 2, "sp": True},
    "tp2 strips": {"tp": 2, "sp": True, "strips": 2},
    "cp2": {"cp": 2},
    "cp2 ring": {"cp": 2, "cp_attention": "ring"},
    "cp2 heads": {"cp": 2, "cp_attention": "heads"},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "tp4": {"tp": 4},
    "tp2 etp1": {"tp": 2, "sp": True, "etp": 1},  # experts stay whole
}
# Programs of tests/tensor_zoo.py, each of four stages; the rest is Hugging Face's.
OWN = {
    "dense": "deep_dense",
    "fused": "deep_fused",
    "tied": "deep",
    "dropout": "deep_dropout",
    "experts": "deep_mixture",
    "counted": "deep_counted",
}
HF = ("llama", "qwen3", "gpt2", "qwen3_moe", "deepseek_v3")
OF_EXPERTS = ("experts", "qwen3_moe", "deepseek_v3")
SCHEDULE = (
    "none", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe", "dualpipev",
)  # fmt: skip
AXES: dict[str, tuple[Any, ...]] = {
    "way": tuple(WAYS), "model": (*OWN, *HF), "schedule": SCHEDULE, "zero": (0, 1, 2, 3)
}  # fmt: skip
PIECES = 8  # global microbatches of every case
ROWS, LENGTH, STEPS = 16, 8, 2


@dataclass(frozen=True)
class TensorCell:
    """One combination. With ZeRO there are two data ranks, which share experts where there are any."""

    way: str
    model: str
    schedule: str
    zero: int

    @property
    def name(self) -> str:
        return f"{self.model}-{self.way.replace(' ', '_')}-{self.schedule}-zero{self.zero}"

    @property
    def degrees(self) -> dict[str, Any]:
        pp, dp = (1 if self.schedule == "none" else 2), (2 if self.zero else 1)
        sizes = {"pp": pp, "dp": dp, **WAYS[self.way]}
        if self.model not in OF_EXPERTS:
            sizes.pop("etp", None)
            return sizes
        beside = sizes["tp"] if "etp" in sizes else 1
        return sizes | ({"ep": 2 * beside} if dp > 1 else {})

    @property
    def num_ranks(self) -> int:
        sizes = self.degrees
        return sizes["pp"] * sizes["dp"] * sizes.get("tp", 1) * sizes.get("cp", 1)

    def job(self) -> Job:
        options: dict[str, Any] = {"zero": self.zero, "microbatches": PIECES // self.degrees["dp"]}
        if self.schedule != "none":
            options["schedule"] = self.schedule
        program = program_of(self.model).apply(parallel(**self.degrees, **options))
        return program.lower(optimizer=ADAMW)

    def errors(self, job: Job, *, adversary: bool) -> Errors:
        """Distance from one device, with all ranks in this process; every case its own adversary."""
        with job.launch("loopback", adversary=adversary, seed=crc32(self.name.encode())) as run:
            if self.model in OWN:
                reference = tensor_zoo.reference_of(OWN[self.model], job)
                return compare(run, tensor_zoo.batches_of(OWN[self.model]), reference)
            reference, explained = _reference(self.model)
            return compare(run, _batches(), reference, explained=explained)


@cache
def program_of(model: str) -> Program:
    """In float64; Hugging Face's own casts to float32, as in routers and norms, are lifted."""
    if model in OWN:
        return tensor_zoo.program_of(OWN[model])
    tiny = ZOO[model]()
    program = piper.trace(doubled_model(tiny.make_model), _batches()[0], tiny.step)
    return lift_program(program)


@cache
def _batches() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, VOCABULARY, (STEPS, ROWS, LENGTH), generator=generator)
    return [doubled({"input_ids": each, "labels": each.clone()}) for each in tokens]


@cache
def _reference(model: str) -> tuple[Trained, Any]:
    """One device on as many microbatches; and how far rounding may lead where gradients vanish."""
    uncut = program_of(model).apply(lambda s: s.split(piper.where(), "MB", PIECES))
    job = uncut.lower(optimizer=ADAMW)
    reference = train_one_device(job, _batches())
    explained = rounding(job, _batches(), reference, eps=torch.finfo(torch.float64).eps)
    return reference, explained


ALL = [TensorCell(*values) for values in product(*AXES.values())]
CELLS = covering(ALL, AXES)
