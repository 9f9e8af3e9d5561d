"""recompute of code that is cut over ranks: layers run again with their communication, exactly."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from torch import Tensor

from piper.api.run import Run
from piper.plan.tasks import Run as Task
from piper.runtime.worker.worker import Worker
from piper.strategies import parallel
from piper.training.verify import Trained, compare, train_one_device
from tests.loopback.pools import loopback
from tests.loopback.storages import unique_bytes
from tests.tensor_checkpoints import Checkpointed, Selective, Untagged, job_of
from tests.tensor_checkpoints import program_of as checkpointed_program
from tests.tensor_zoo import BATCH, LENGTH, WIDTH, batches_of, program_of, reference_of
from tests.zoo import ADAMW

pytestmark = pytest.mark.xdist_group("tensor_again")

# Model, degrees, and what `lower` takes.
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dense", {"tp": 2}, {"clip": 0.1}),
    ("dense", {"tp": 4, "sp": True}, {}),
    ("dropout", {"tp": 2, "sp": True, "dp": 2, "zero": 3, "microbatches": 2}, {"clip": 0.1}),
    ("dropout", {"tp": 2, "pp": 2, "microbatches": 4, "schedule": "1f1b"}, {}),
    ("tied", {"tp": 2, "dp": 2, "zero": 1, "microbatches": 2}, {"clip": 0.1, "late_clip": True}),
    ("tied", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4}, {}),
    ("fused", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("grouped", {"tp": 2, "dp": 2, "zero": 2, "microbatches": 2}, {}),
    ("counted", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "zb_h2"}, {}),
    ("experts", {"tp": 2, "dp": 2, "ep": 2, "zero": 1, "microbatches": 2}, {}),
    ("experts", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "1f1b"}, {}),
    ("dropout", {"cp": 2}, {}),
    ("rms", {"cp": 2, "tp": 2, "sp": True}, {"clip": 0.1}),
    ("dense", {"cp": 4, "cp_attention": "heads", "dp": 2, "zero": 2}, {}),
    ("rms", {"cp": 2, "cp_attention": "heads", "tp": 2, "sp": True}, {}),
    ("dropout", {"cp": 4, "cp_attention": "ring", "tp": 2}, {}),
    ("rms", {"cp": 2, "cp_attention": "ring", "pp": 2, "microbatches": 4, "schedule": "zb_h1"}, {}),
    ("deep", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "dualpipev"}, {}),
    ("deep", {"tp": 2, "pp": 2, "dp": 2, "zero": 3, "microbatches": 4, "schedule": "dualpipev"}, {}),
    ("deep", {"cp": 2, "tp": 2, "sp": True, "pp": 2, "dp": 2, "zero": 3, "microbatches": 4,
              "schedule": "zb_h1"}, {}),
    ("deep", {"tp": 2, "pp": 4, "microbatches": 8, "schedule": "1f1b"}, {}),
    ("deep", {"tp": 2, "sp": True, "pp": 2, "microbatches": 4, "schedule": "interleaved_1f1b"}, {}),
]  # fmt: skip


def _name(row: tuple[str, dict[str, Any], dict[str, Any]]) -> str:
    model, degrees, more = row
    return "-".join([model, *(f"{k}{v}" for k, v in (*degrees.items(), *more.items()))])


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_trains_like_one_device(
    row: tuple[str, dict[str, Any], dict[str, Any]], adversary: bool
) -> None:
    name, degrees, more = row
    strategy = parallel(**degrees, recompute="nothing")
    job = program_of(name).apply(strategy).lower(optimizer=ADAMW, **more)
    with job.launch("loopback", adversary=adversary, seed=len(_name(row))) as run:
        errors = compare(run, batches_of(name), reference_of(name, job))
    assert errors.exact, errors


CALLS: list[tuple[type[Untagged], dict[str, Any]]] = [
    (Checkpointed, {"dropout": 0.3}),
    (Checkpointed, {"sp": True, "dropout": 0.3}),
    (Checkpointed, {"tp": 4, "sp": True, "recompute": "expensive"}),
    (Checkpointed, {"recompute": "pieces"}),
    (Selective, {"sp": True}),
    (Selective, {"recompute": "nothing"}),
    (Untagged, {"sp": True, "dropout": 0.3, "recompute": "nothing"}),
]


@cache
def _reference(kind: type[Untagged], dropout: float) -> Trained:
    job = checkpointed_program(kind, 2, dropout).lower(optimizer=ADAMW)
    return train_one_device(job, batches_of("dense"))


@pytest.mark.parametrize("adversary", [False, True], ids=["plain", "adversary"])
@pytest.mark.parametrize(("kind", "how"), CALLS, ids=str)
def test_checkpointed_calls_train_like_one_device(
    kind: type[Untagged], how: dict[str, Any], adversary: bool
) -> None:
    job = job_of(kind, 2, **how)
    with job.launch("loopback", adversary=adversary, seed=1) as run:
        errors = compare(run, batches_of("dense"), _reference(kind, how.get("dropout", 0.0)))
    assert errors.exact, errors


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("layers", [2, 4])
def test_a_layer_keeps_its_input_in_memory(layers: int, sp: bool) -> None:
    """Unique storages that forwards have left to backwards: of the inputs of layers and of the head."""
    job = job_of(Untagged, layers, sp=sp, recompute="nothing")
    most = {0: 0, 1: 0}
    (part,) = job.plan.classes
    forwards = [task for task in part.tasks if isinstance(task, Task) and task.phase == "F"]
    left = {slot for task in forwards for slot in (*task.inputs, *task.outputs)}

    def look(worker: Worker) -> None:
        slots = (worker.slots[slot] for slot in left if worker.use[slot] == "saved")
        saved = [tensor for tensor in slots if isinstance(tensor, Tensor)]
        most[worker.me.rank] = max(most[worker.me.rank], unique_bytes(saved))

    Run(job.plan, loopback(job.plan, job.bodies, observe=look)).step(batches_of("dense")[0])
    each = BATCH * LENGTH * WIDTH * 8 // (2 if sp else 1)
    assert most == {0: (layers + 1) * each, 1: (layers + 1) * each}
