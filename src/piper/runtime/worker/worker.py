"""Worker: one rank's Tasks, prepared once and run every step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from piper.errors import RunError
from piper.ir.tensor_type import accumulation_dtype
from piper.plan.types import PERSISTENT, Plan, Slot, Task, bind
from piper.runtime.failure.board import STEP, Board
from piper.runtime.order.device_order import DeviceOrder
from piper.runtime.order.host_order import HostOrder
from piper.runtime.transport.transport import Exchange, Pending, Transport
from piper.runtime.worker.adding import add_to_bucket, add_values, parts_of, views
from piper.runtime.worker.buffers import pooled_tensors
from piper.runtime.worker.functions import body_functions
from piper.runtime.worker.key_slots import Keys
from piper.runtime.worker.update import Updater, clip_scale
from piper.runtime.worker.weights import initial_value

Start = Callable[[], Pending | None]
_MODEL = ("param", "flat", "shard", "buffer")


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
        self._wide: dict[int, Tensor] = {}  # initial values of parameters of a narrower dtype
        if shares is None:
            self._fill_model(bodies)
        else:
            self._share_model(shares)
        self._fill_constants()
        self._functions = body_functions(self.me, bodies, device=device, compile=compile)
        prepare = {
            "run": self._run, "add": self._add, "read": self._read, "norm": self._norm,
            "update": self._update, "settle": self._settle, "send": self._exchange,
            "recv": self._exchange, "all_reduce": self._exchange, "all_to_all": self._exchange,
            "reduce_scatter": self._exchange, "all_gather": self._exchange,
        }  # fmt: skip
        self.starts: list[Start] = [prepare[task.kind](task) for task in self.me.tasks]
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

    def _wide_of(self, index: int) -> Tensor | None:
        """The initial value of a parameter, or of a rank's part of several, before it was narrowed."""
        slot = self.me.slots[index]
        if slot.base < 0 or slot.base not in self._wide:
            return self._wide.get(index)
        part, parts = self.me.part_of(slot, self.plan.mesh)
        return self._wide[slot.base].chunk(parts)[part].clone()

    def _share_model(self, other: Worker) -> None:
        """Hold the same tensors of the model as another worker."""
        theirs = {slot.name: i for i, slot in enumerate(other.me.slots) if slot.kind in _MODEL}
        for index, slot in enumerate(self.me.slots):
            if slot.kind in _MODEL and slot.base < 0:
                known = theirs.get(slot.name, -1)
                has = other.me.slots[known] if known >= 0 else None
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

    # One function per kind of task: given the task, returns what to call when it starts.

    def _run(self, task: Task) -> Start:
        function, slots, reads, writes = (
            self._functions[task.body],
            self.slots,
            task.reads,
            task.writes,
        )

        def start() -> None:
            results = function(*[slots[i] for i in reads])
            for i, result in zip(writes, results, strict=True):
                slots[i] = result

        return start

    def _add(self, task: Task) -> Start:
        slot = self.me.slots[task.writes[0]]
        if slot.bucket < 0:
            return add_values(task, self.slots, self.me.slots)
        return add_to_bucket(task, self.slots, slot, self.plan.buckets[slot.bucket], self.device)

    def _read(self, task: Task) -> Start:
        sent, received = task.reads
        (target,) = task.writes
        peers = len(self.me.groups[task.group])

        def start() -> None:
            rows = [self.slots[i].reshape(peers, -1).sum(1) for i in (sent, received)]
            self.slots[target] = torch.stack(rows).tolist()

        return start

    def _norm(self, task: Task) -> Start:
        pairs = list(zip(task.reads, task.weights, strict=True))
        (target,) = task.writes

        def start() -> None:
            total = torch.zeros((), dtype=torch.float64, device=self.device)
            for source, weight in pairs:
                norm = torch.linalg.vector_norm(self.slots[source], dtype=torch.float64)
                total += norm.square() * weight
            self.slots[target] = total

        return start

    def _update(self, task: Task) -> Start:
        bucket = self.plan.buckets[task.bucket]
        stepped = task.writes[:-1]
        updater = Updater(
            self.plan.optimizer,
            [self.slots[i] for i in stepped],
            [self._wide_of(i) for i in stepped],
        )
        self.updaters[task.bucket] = updater
        (flat, *more) = task.reads
        norm = more.pop() if task.clip is not None else None
        grads = [self.slots[flat]] if bucket.over else views(self.slots[flat], parts_of(bucket))
        looks = bool(more) and self.device.type == "cpu"  # elsewhere the host would wait for it

        def start() -> None:
            divisor: Any = self.slots[more[0]] if more else task.count
            if looks:
                _check_count(float(divisor))
            scale = None
            if norm is not None and task.clip is not None:
                scale = clip_scale(self.slots[norm], divisor, task.clip)
            if task.late:
                updater.keep()
            updater.step(grads, divisor, scale)

        return start

    def _settle(self, task: Task) -> Start:
        updater = self.updaters[task.bucket]
        largest = task.clip
        assert largest is not None
        count = None if task.count is not None else task.reads[-2]

        def start() -> None:
            divisor: Any = task.count if count is None else self.slots[count]
            updater.settle(clip_scale(self.slots[task.reads[-1]], divisor, largest))

        return start

    def _exchange(self, task: Task) -> Start:
        exchange = Exchange(
            task=task,
            stream=self.plan.streams[task.stream],
            rank=self.me.rank,
            ranks=self.me.groups[task.group],
            outputs=tuple(s for s in (self.me.slots[i] for i in task.writes) if s.base < 0),
        )
        hosts = [i for i in task.reads if self.me.slots[i].kind == "host"]
        (source, *_) = [i for i in task.reads if i not in hosts] or [-1]
        stays = [i for i in task.writes if self.me.slots[i].kind in PERSISTENT]
        target = stays[0] if stays and self.me.slots[stays[0]].base < 0 else -1
        (place,) = [self.pooled[i] for i in task.writes if i in self.pooled] or [None]

        def start() -> Pending:
            splits = self.slots[hosts[0]] if hosts else None
            tensor = self.slots[source] if source >= 0 else None
            into = self.slots[target] if target >= 0 else place
            return self.transport.start(exchange, tensor, splits, into)

        return start

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
        whole = [slot for slot in self.me.tasks[index].writes if self.me.slots[slot].base < 0]
        for slot, result in zip(whole, results, strict=True):
            if slot in self.pooled:
                place = self.slots[slot] = self.pooled[slot]
                if result is not place:
                    place.copy_(result)
            elif self.me.slots[slot].kind not in PERSISTENT:
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
        _check_count(found["count"])
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


def _check_count(count: float) -> None:
    if count == 0:
        raise RunError("the total count of the batch is 0: there is nothing to average")
