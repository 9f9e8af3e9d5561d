"""Worker: one rank's Tasks, prepared once and run every step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from piper.errors import RunError
from piper.plan.holdings import Holding, held_in, holdings, window
from piper.plan.local_order import Local
from piper.plan.memory_use import memory_use
from piper.plan.slots import LINGERING, MODEL, PARTS, STAYING, Slot
from piper.plan.summed_inside import summed_inside
from piper.plan.tasks import Comm, Update
from piper.plan.types import Plan, bind
from piper.runtime.failure.board import STEP, Board
from piper.runtime.order.device_order import DeviceOrder
from piper.runtime.order.host_order import HostOrder
from piper.runtime.state.given import Given
from piper.runtime.state.restore import restore
from piper.runtime.transport.transport import Transport
from piper.runtime.worker.buffers import pooled_tensors
from piper.runtime.worker.ended_step import StepResults
from piper.runtime.worker.functions import body_functions
from piper.runtime.worker.handlers import Start, prepare
from piper.runtime.worker.key_slots import Keys, Steps
from piper.runtime.worker.step_guard import Guard
from piper.runtime.worker.to_device import lent, to_device
from piper.runtime.worker.update import Updater
from piper.runtime.worker.weights import Weights
from piper.stored.stored_pieces import StoredState


class Worker:
    """Executes the plan of one rank over a transport.

    `slots` holds every tensor; a task is started, finished (if it communicates) and then releases
    what it frees, but bodies drop what is `handed` over at its last use, and add what is `summed` to
    its sum instead of leaving it in its slot. `step` does so in the order of the device; the loopback
    engine in any order that the plan's streams and waits allow. Gradients that were reduced in the place
    of a sum are there until the next step. `cells` is where the worker says how far it is.
    A worker that `shares` holds the tensors of another one; if it trains, it goes on with its gradients,
    optimizers and steps, too. Otherwise it starts from what is `stored`, in files or in `memory`, or
    what it is `given` of that, and makes the rest.
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
        stored: StoredState | None = None,
        memory: Mapping[str, Tensor] | None = None,
        given: Given | None = None,
        compile: bool = False,
    ) -> None:
        self.plan = plan
        self.cells = Board(1).cells(0) if cells is None else cells
        self.me = bind(plan, rank)
        self.holdings = holdings(plan, rank)
        self.use = memory_use(self.me.slots, self.me.tasks)
        local = Local(self.me.tasks, self.me.slots)
        self.handed = local.handed
        self.summed = summed_inside(local, plan.products, plan.device)
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
        self.lingering = [i for i, s in enumerate(self.me.slots) if s.kind in LINGERING]
        self.pooled: dict[int, Tensor] = {}  # slot -> its shape of a buffer that it shares
        trained = shares if plan.train else None
        self.updaters: dict[int, Updater] = trained.updaters if trained else {}  # per bucket
        self.evaluations: Steps = shares.evaluations if shares else Steps()
        self.steps: Steps = trained.steps if trained else self.evaluations if shares else Steps()
        self.keys = Keys(plan, self.me, self.device, self.steps)
        self._targets = [  # per task, what it fills if it communicates
            (t.target,) if isinstance(t, Comm) and t.facts.leaves else () for t in self.me.tasks
        ]
        self._masters = {n: b.master for b in plan.buckets if b.trained for n in b.params}
        self._wide: dict[int, Tensor] = {}  # initial values of parameters of a narrower dtype
        if shares is None:
            self.weights = Weights(plan, bodies, stored, memory, given)
            self._fill_model()
        else:
            self.weights = shares.weights.of(plan, bodies, given)
            self._share_model(shares)
        self._fill_constants(trained)
        self.functions = body_functions(
            self.me, bodies, self.summed, device=device, compile=compile
        )
        self.guard = Guard(self)
        self.starts: list[Start] = [prepare(self, task) for task in self.me.tasks]
        self._wide.clear()
        if stored is not None:
            restore(self, stored)
        self.order = DeviceOrder(self) if self.device.type == "cuda" else HostOrder(self)

    def _fill_model(self) -> None:
        """Initial values of what this rank holds, and of nothing else."""
        by_slot: dict[int, list[Holding]] = defaultdict(list)
        for held in self.holdings:
            if held.what in ("param", "buffer"):
                by_slot[held.slot].append(held)
        for index, slot in enumerate(self.me.slots):
            if slot.kind in MODEL and slot.base < 0:
                self._fill(index, self._initial(slot, by_slot[index]))

    def _initial(self, slot: Slot, held: list[Holding]) -> Tensor:
        """A tensor, or the pieces of a bucket side by side, before they are narrowed."""
        values = (self.weights.elements(h) for h in held)
        if slot.bucket < 0:
            (value,) = values
            return value.reshape(slot.shape).clone()
        flat = torch.zeros(slot.shape, dtype=getattr(torch, self._master(slot)))
        for h, value in zip(held, values, strict=True):
            flat[h.offset : h.offset + value.numel()] = value
        return flat

    def _fill(self, index: int, value: Tensor) -> None:
        """A tensor of the model; what a narrower dtype loses of it is kept for masters."""
        name = self.me.slots[index].dtype
        dtype = getattr(torch, name)
        self.put(index, value.to(self.device, dtype))
        if value.dtype != dtype and self._master(self.me.slots[index]) != name:
            self._wide[index] = value

    def _master(self, slot: Slot) -> str:
        """The dtype in which what lies in a slot of the model is stepped; its own if it is not."""
        if slot.bucket >= 0:
            return self.plan.buckets[slot.bucket].master
        return self._masters.get(slot.source, slot.dtype)

    def wide_of(self, index: int) -> Tensor | None:
        """The initial value of a parameter, or of a rank's part of several, before it was narrowed."""
        slot = self.me.slots[index]
        if slot.base < 0 or slot.base not in self._wide:
            return self._wide.get(index)
        begin, end = window(self.plan, self.me, slot)
        return self._wide[slot.base][begin:end].clone()

    def _share_model(self, other: Worker) -> None:
        """Hold the same tensors of the model as another worker, which has the same elements. What that
        one neither reads nor trains is as it was in the beginning."""
        slots = enumerate(other.me.slots)
        theirs = {other.content(i): i for i, s in slots if s.kind in MODEL and s.base < 0}
        held = {h.tensor for h in other.holdings}
        for index, slot in enumerate(self.me.slots):
            if slot.kind in MODEL and slot.base < 0:
                known = theirs.get(self.content(index))
                tensor = other.plan.tensors.get(slot.source)
                fresh = slot.source not in held and not (tensor and tensor.trainable)
                if known is None and slot.source and fresh:
                    held_here = list(held_in(self.plan, self.me, index))
                    self._fill(index, self._initial(slot, held_here))
                    continue
                if known is None:
                    raise RunError(
                        f"rank {self.me.rank}: {slot.name} is {slot.dtype}{list(slot.shape)}, but "
                        "the worker it is shared with has none",
                        legal="a plan, its own evaluation and those for batches of other shapes",
                    )
                self.put(index, other.slots[known])

    def content(self, index: int) -> tuple[object, ...]:
        """What lies in a slot, whatever its number is."""
        slot = self.me.slots[index]
        held = held_in(self.plan, self.me, index)
        pieces = tuple((h.what, h.tensor, h.part, h.first, h.last, h.offset) for h in held)
        return (slot.kind, slot.shape, slot.dtype, pieces)

    def _fill_constants(self, trained: Worker | None) -> None:
        theirs = trained._gradients if trained else {}
        for index, slot in enumerate(self.me.slots):
            if slot.kind == "grad" and slot.base < 0:
                known = theirs.get(self.content(index))
                self.put(index, self._empty(slot).zero_() if known is None else known)
            elif slot.kind == "constant":
                self.put(index, self._empty(slot).fill_(float(slot.source)))
            elif slot.kind == "coordinate":
                self.put(index, self._empty(slot).fill_(self.me.coordinates[slot.source]))
        self.pooled = pooled_tensors(self.me.slots, self.device)

    @property
    def _gradients(self) -> dict[tuple[object, ...], Tensor]:
        """By their content."""
        slots = enumerate(self.me.slots)
        return {self.content(i): self.slots[i] for i, s in slots if s.kind == "grad"}

    def stays(self, index: int) -> bool:
        """Whether a slot has the same memory in all steps."""
        slot = self.me.slots[index]
        return slot.kind in STAYING and (slot.base < 0 or self.stays(slot.base))

    def put(self, index: int, tensor: Any) -> None:
        """Fill a slot, and those that show a part of it."""
        self.slots[index] = tensor
        for part in self._parts.get(index, ()):
            slot = self.me.slots[part]
            size = math.prod(slot.shape)
            start = slot.offset
            if slot.kind in PARTS:
                start, _ = window(self.plan, self.me, slot)
            self.put(part, tensor[start : start + size].view(slot.shape))

    def _empty(self, slot: Slot) -> Tensor:
        return torch.empty(slot.shape, dtype=getattr(torch, slot.dtype), device=self.device)

    # Running

    def load_batch(self, leaves: Mapping[str, Tensor]) -> None:
        """Begin a step: every microbatch gets its rows of this rank's share, and its keys."""
        if self.plan.train:
            if self.steps.last is not None:
                self.steps.last.drop_gradients()
            self.steps.last, self.steps.under_way = None, True
        num = self.plan.num_microbatches
        used = {slot.source for _, slot in self.batch_slots}
        leaves = {name: lent(leaves[name], self.device) for name in used}
        for index, slot in self.batch_slots:
            leaf = leaves[slot.source]
            rows = leaf.shape[0] // num
            part = leaf[slot.microbatch * rows : (slot.microbatch + 1) * rows]
            dtype = getattr(torch, slot.dtype) if part.is_floating_point() else part.dtype
            self.slots[index] = to_device(part, self.device).to(dtype).contiguous()
        self.keys.load(self.slots)
        self.guard.begin()

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """From the next step on, parameter groups have these values, such as {"lr": 3e-4}."""
        for updater in self.updaters.values():
            updater.set_options(options)

    def step(self, leaves: Mapping[str, Tensor]) -> dict[str, Any]:
        """One training step; the loss, the count and the metrics of the whole batch."""
        return self.begin(leaves).get()

    def begin(self, leaves: Mapping[str, Tensor]) -> StepResults:
        """A step, of which a device may have much to do yet; so it may of the one before."""
        self.cells[STEP] = self.steps.begun + 1
        with torch.no_grad(), self.order.home():
            self.load_batch(leaves)
            self.order.run()
            return self.end_step()

    def settled_steps(self) -> int | None:
        """How many steps have changed all that they change of what this rank holds; -1 in the middle of
        that, None where there is nothing."""
        found = {updater.taken for updater in self.updaters.values()}
        if any(updater.unsettled for updater in self.updaters.values()):
            return -1
        if self.steps.folded:
            whole = self.steps.folded <= self.steps.finished
            found.add(self.steps.finished if whole else -1)
        if len(found) > 1:
            return -1
        return found.pop() if found else None

    def write(self, index: int, results: list[Tensor]) -> None:
        """Fill what a communication wrote; what stays keeps its memory, in which others have a part."""
        for slot, result in zip(self._targets[index], results, strict=True):
            if slot in self.pooled:
                place = self.slots[slot] = self.pooled[slot]
                if result is not place:
                    place.copy_(result)
            elif self.me.slots[slot].kind not in STAYING:
                self.put(slot, result)
            elif result is not self.slots[slot]:
                self.slots[slot].copy_(result)

    def free(self, slot: int) -> None:
        """Forget a slot's tensor, not a buffer; communication under way keeps what it needs."""
        self.slots[slot] = None
        for part in self._parts.get(slot, ()):
            self.slots[part] = None

    def drop_gradients(self) -> None:
        """Of the last step, those that were reduced in the place of a sum."""
        for slot in self.lingering:
            self.free(slot)

    def end_step(self) -> StepResults:
        """Keep only the rank's part of what lingers; the loss, count and metrics of the whole batch."""
        if self.plan.train:
            self.steps.last, self.steps.under_way = self, False
        for slot in self.lingering:
            for part in self._parts[slot]:
                self.slots[part] = self.slots[part].clone()
            self.slots[slot] = None
        return StepResults(self)

    def tensors(self, what: str) -> dict[str, Tensor]:
        """What this rank holds of a kind, by the keys of its holdings (see `plan/holdings.py`).
        Optimizer state is there after the first step."""
        found: dict[str, Tensor] = {}
        for held in self.holdings:
            if held.what == what:
                tensor = self.held(held)
                if tensor is not None:
                    found[held.key] = tensor
        return found

    def stepping(self, slot: int) -> tuple[Updater, int]:
        """Who steps what lies in a slot, and as which of its tensors."""
        return self._stepping[slot]

    def held(self, held: Holding) -> Tensor | None:
        """The elements of a holding: of its slot, or of what the optimizer keeps for that."""
        whole: Tensor | None = self.slots[held.slot]
        start = held.offset
        if held.what == "grad":
            whole = self._last_gradient(held.slot)
        if held.what in ("master", "average", "state"):
            updater, place = self._stepping[held.slot]
            whole = (updater.averages if held.what == "average" else updater.masters)[place]
        if held.what == "state":
            state, begin = updater.state_at(place, held.offset)
            whole, start = state.get(held.state), held.offset - begin
        if whole is None or held.form != "elements":
            return whole
        flat = whole.detach().reshape(-1)[start : start + held.last - held.first]
        return flat.view(held.part.size) if held.is_whole else flat

    def _last_gradient(self, index: int) -> Tensor:
        """What the last step has left of a gradient, by whichever plan; zeros before the first one."""
        last = self.steps.last
        if last is None:
            if self.steps.under_way:
                raise RunError("the last step did not end, so that there are no gradients of it")
            return self._empty(self.me.slots[index]).zero_()
        found: Tensor = self.slots[index] if last is self else last._gradients[self.content(index)]
        return found

    @cached_property
    def _stepping(self) -> dict[int, tuple[Updater, int]]:
        """Slot -> who steps it, and as which of its tensors."""
        return {
            slot: (self.updaters[task.bucket], place)
            for task in self.me.tasks
            if isinstance(task, Update)
            for place, slot in enumerate(task.stepped)
        }
