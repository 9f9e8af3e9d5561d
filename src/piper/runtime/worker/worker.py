"""Worker: one rank's Tasks, prepared once and run every step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from piper.errors import RunError
from piper.ir.tensor_type import accumulation_dtype
from piper.plan.slots import MODEL, STAYING, Slot
from piper.plan.tasks import Comm
from piper.plan.types import Plan, bind
from piper.runtime.failure.board import STEP, Board
from piper.runtime.order.device_order import DeviceOrder
from piper.runtime.order.host_order import HostOrder
from piper.runtime.transport.transport import Transport
from piper.runtime.worker.buffers import pooled_tensors
from piper.runtime.worker.functions import body_functions
from piper.runtime.worker.handlers import Start, check_count, prepare
from piper.runtime.worker.key_slots import Keys
from piper.runtime.worker.update import Updater
from piper.runtime.worker.weights import initial_value


class Worker:
    """Executes the plan of one rank over a transport.

    `slots` holds every tensor; a task is started, finished (if it communicates) and then releases
    what it frees. `step` does so in the order of the device; the loopback engine in any order that
    the plan's streams and waits allow. `cells` is where the worker says how far it is.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        *,
        bodies: Mapping[str, str],
        transport: Transport,
        device: str = "cpu",
        cells: memoryview | None = None,
        shares: Worker | None = None,
        compile: bool = False,
    ) -> None:
        self.plan = plan
        self.cells = Board(1).cells(0) if cells is None else cells
        self.me = bind(plan, rank)
        self.device = torch.device(device)
        self.transport = transport
        self.slots: list[Any] = [None] * len(self.me.slots)
        self.batch_slots = [(i, s) for i, s in enumerate(self.me.slots) if s.kind == "batch"]
        self._parts: dict[int, list[int]] = defaultdict(
            list
        )  # slot -> slots that show a part of it
        for index, slot in enumerate(self.me.slots):
            if slot.base >= 0:
                self._parts[slot.base].append(index)
        self.pooled: dict[int, Tensor] = {}  # slot -> its shape of a buffer that it shares
        self.updaters: dict[int, Updater] = {}  # per bucket
        self.keys = Keys(plan, self.me, self.device)
        self._targets = [  # per task, what it fills if it communicates
            (t.target,) if isinstance(t, Comm) and t.facts.leaves else () for t in self.me.tasks
        ]
        self._wide: dict[int, Tensor] = {}  # initial values of parameters of a narrower dtype
        if shares is None:
            self._fill_model(bodies)
        else:
            self._share_model(shares, bodies)
        self._fill_constants()
        self.functions = body_functions(self.me, bodies, device=device, compile=compile)
        self.starts: list[Start] = [prepare(self, task) for task in self.me.tasks]
        self._wide.clear()
        self.order = DeviceOrder(self) if self.device.type == "cuda" else HostOrder(self)

    def _fill_model(self, bodies: Mapping[str, str]) -> None:
        for index, slot in enumerate(self.me.slots):
            if slot.kind in ("param", "buffer") and slot.base < 0:
                self._fill(index, self._initial(slot.source, slot.split_over, bodies))
            elif slot.kind == "flat":
                self._fill(index, self._initial_bucket(slot.bucket, bodies))
            elif slot.kind == "shard" and slot.base < 0:
                part, parts = self.me.part_of(slot, self.plan.mesh)
                whole = self._initial_bucket(slot.bucket, bodies)
                self._fill(index, whole.chunk(parts)[part].clone())

    def _fill(self, index: int, value: Tensor) -> None:
        """A tensor of the model; what a narrower dtype loses of it is kept for masters."""
        dtype = getattr(torch, self.me.slots[index].dtype)
        self._set(index, value.to(self.device, dtype))
        if value.dtype != dtype:
            self._wide[index] = value

    def wide_of(self, index: int) -> Tensor | None:
        """The initial value of a parameter, or of a rank's part of several, before it was narrowed."""
        slot = self.me.slots[index]
        if slot.base < 0 or slot.base not in self._wide:
            return self._wide.get(index)
        part, parts = self.me.part_of(slot, self.plan.mesh)
        return self._wide[slot.base].chunk(parts)[part].clone()

    def _share_model(self, other: Worker, bodies: Mapping[str, str]) -> None:
        """Hold the same tensors of the model as another worker. What that one neither reads nor trains
        is as it was in the beginning."""
        theirs = {slot.name: i for i, slot in enumerate(other.me.slots) if slot.kind in MODEL}
        for index, slot in enumerate(self.me.slots):
            if slot.kind in MODEL and slot.base < 0:
                known = theirs.get(slot.name, -1)
                has = other.me.slots[known] if known >= 0 else None
                tensor = other.plan.tensors.get(slot.source)
                if has is None and slot.source and not (tensor and tensor.trainable):
                    self._fill(index, self._initial(slot.source, slot.split_over, bodies))
                    continue
                if has is None or (has.shape, has.dtype) != (slot.shape, slot.dtype):
                    raise RunError(
                        f"rank {self.me.rank}: {slot.name} is {slot.dtype}{list(slot.shape)}, but "
                        "the worker it is shared with has "
                        + (f"{has.dtype}{list(has.shape)}" if has else "none"),
                        legal="a plan and its own evaluation",
                    )
                self._set(index, other.slots[known])

    def _fill_constants(self) -> None:
        for index, slot in enumerate(self.me.slots):
            if slot.kind == "grad":
                self._set(index, self._empty(slot).zero_())
            elif slot.kind == "constant":
                self._set(index, self._empty(slot).fill_(float(slot.source)))
        self.pooled = pooled_tensors(self.me.slots, self.device)

    def _initial(
        self, source: str, split_over: tuple[str, ...], bodies: Mapping[str, str]
    ) -> Tensor:
        whole = initial_value(self.plan.tensors[source], bodies, seed=self.plan.seed)
        part, parts = self.me.part_along(split_over, self.plan.mesh)
        return (whole.chunk(parts)[part] if parts > 1 else whole).clone()

    def _initial_bucket(self, number: int, bodies: Mapping[str, str]) -> Tensor:
        bucket = self.plan.buckets[number]
        dtype = accumulation_dtype(bucket.dtype)
        flat = torch.zeros(bucket.size, dtype=getattr(torch, dtype))
        for name, start in zip(bucket.params, bucket.offsets, strict=True):
            value = self._initial(name, bucket.split_over, bodies)
            flat[start : start + value.numel()] = value.flatten()
        return flat

    def _set(self, index: int, tensor: Any) -> None:
        """Fill a slot, and those that show a part of it."""
        self.slots[index] = tensor
        for part in self._parts.get(index, ()):
            slot = self.me.slots[part]
            size = math.prod(slot.shape)
            start = slot.offset
            if slot.kind == "shard":
                start = self.me.part_of(slot, self.plan.mesh)[0] * size
            self._set(part, tensor[start : start + size].view(slot.shape))

    def _empty(self, slot: Slot) -> Tensor:
        return torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self.device)

    # Running

    def load_batch(self, leaves: Mapping[str, Tensor]) -> None:
        """Begin a step: every microbatch gets its rows of this rank's share, and its keys."""
        num = self.plan.num_microbatches
        for index, slot in self.batch_slots:
            leaf = leaves[slot.source]
            rows = leaf.shape[0] // num
            part = leaf[slot.microbatch * rows : (slot.microbatch + 1) * rows]
            dtype = getattr(torch, slot.dtype) if part.is_floating_point() else part.dtype
            self.slots[index] = part.to(self.device, dtype).contiguous()
        self.keys.load(self.slots)

    def set_options(self, options: Mapping[str, Any]) -> None:
        """From the next step on, optimizers have these values, such as {"lr": 3e-4}."""
        for updater in self.updaters.values():
            updater.set_options(options)

    def step(self, leaves: Mapping[str, Tensor]) -> dict[str, float]:
        """One training step; the loss and count of the whole batch."""
        self.cells[STEP] = self.keys.step + 1
        with torch.no_grad(), self.order.home():
            self.load_batch(leaves)
            self.order.run()
            return self.results()

    def write(self, index: int, results: list[Tensor]) -> None:
        """Fill what a communication wrote; what stays keeps its memory, in which others have a part."""
        for slot, result in zip(self._targets[index], results, strict=True):
            if slot in self.pooled:
                place = self.slots[slot] = self.pooled[slot]
                if result is not place:
                    place.copy_(result)
            elif self.me.slots[slot].kind not in STAYING:
                self._set(slot, result)
            elif result is not self.slots[slot]:
                self.slots[slot].copy_(result)

    def free(self, slot: int) -> None:
        """Forget a slot's tensor, not a buffer; communication under way keeps what it needs."""
        self.slots[slot] = None
        for part in self._parts.get(slot, ()):
            self.slots[part] = None

    def results(self) -> dict[str, float]:
        found = {name: float(self.slots[i]) for name, i in self.me.results.items()}
        found.setdefault("count", float(self.plan.num_data_ranks * self.plan.num_microbatches))
        check_count(found["count"])
        return found

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """What this rank holds of a kind: buffers, and parameters that are whole here, by their name in
        the model; parts and gradients of buckets by `$` and the bucket's. `master` are parameters, or
        the rank's parts of buckets, as optimizers hold them."""
        if kind == "master":
            return self._masters()
        found = {}
        for index, slot in enumerate(self.me.slots):
            whole = slot.base < 0 or self.me.slots[slot.base].kind == "flat"
            if kind == slot.kind and kind in ("param", "buffer") and whole:
                found[slot.source] = self.slots[index]
            elif slot.kind == ("shard" if kind == "param" else kind) and slot.base < 0:
                found[f"${self.plan.buckets[slot.bucket].name}"] = self.slots[index]
        return found

    def _masters(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, updater in self.updaters.items():
            bucket, values = self.plan.buckets[number], [m.detach() for m in updater.masters]
            names = [f"${bucket.name}"] if bucket.over else bucket.params
            found.update(zip(names, values, strict=True))
        return found
