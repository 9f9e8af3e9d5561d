"""Member: one rank, with its communicators and the plans it has loaded."""

from __future__ import annotations

import gc
import re
import sys
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from piper.bodies.no_compiler import spare_compiler
from piper.cost.exchange_times import LinkTimes
from piper.errors import PiperError
from piper.plan.types import Plan, plan_from_json
from piper.runtime.failure.board import Board, begin, clear, end
from piper.runtime.launch.devices import device_facts
from piper.runtime.launch.reader import Fetched, Reader
from piper.runtime.launch.reading import function_of, import_reference
from piper.runtime.order.host_order import PeerError
from piper.runtime.record.clocks import Tie, common_tie, own_tie
from piper.runtime.record.device_recorder import DeviceRecorder
from piper.runtime.record.host_recorder import HostRecorder
from piper.runtime.record.link_times import Groups, measure_links
from piper.runtime.record.recorder import RankTimes, Recorder
from piper.runtime.state.lent import Lent
from piper.runtime.state.weight_writing import write_weights
from piper.runtime.state.write_pieces import Writing
from piper.runtime.transport.distributed import Communicators, DistributedTransport
from piper.runtime.transport.gates import Gates
from piper.runtime.transport.null import NullTransport
from piper.runtime.transport.transport import Transport
from piper.runtime.worker.ended_step import StepResults
from piper.runtime.worker.heap import keep_memory
from piper.runtime.worker.storages import bytes_by_use, largest, measured_bytes, out_of_memory
from piper.runtime.worker.torch_trace import profiled
from piper.runtime.worker.worker import Worker
from piper.stored.stored_pieces import StoredState
from piper.stored.weight_files import Place
from piper.stored.writers import Entry


class Member:
    """Does what a driver asks: each public method is a command that takes one payload.

    A rank with a process of its own communicates by torch.distributed, once it has joined the others;
    `transport` is for ranks of one process.
    """

    def __init__(
        self,
        rank: int,
        *,
        device: str = "cpu",
        cells: memoryview | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.rank = rank
        self.device = torch.device(device)
        self.transport = transport
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif transport is None:
            keep_memory()
        self.cells = Board(1).cells(0) if cells is None else cells
        clear(self.cells)
        self.communicators = Communicators(self.device)
        self.workers: dict[str, Worker] = {}  # by the plan's role: "train", ...
        self.readers: dict[str, Reader | None] = {}  # by role; None where no batch is needed
        self.at: Worker | None = None  # the one that was asked last
        self.begun: deque[StepResults] = deque()  # of steps that nobody has waited for
        self.taken: Mapping[str, Tensor] = {}  # the batch of a step that may be run again
        self.lent: Lent | None = None  # what parameters hold instead of their own values
        self.writing: Writing | None = None  # the state, beside the work
        self.recording: tuple[Recorder, Tie] | None = None  # the times of a plan's tasks

    def join(self, payload: Mapping[str, Any]) -> str:
        """Meet the other ranks; why there can be no gates between them, if so."""
        settings = dict(payload)
        gates = settings.pop("gates", None)
        join(self.rank, **settings)
        if gates is None:
            return ""
        self.communicators.gates = Gates(gates, self.device)
        return self.communicators.gates.problem

    def ungate(self, _: object = None) -> None:
        """Do without gates, since not every rank can have them."""
        self.communicators.gates = None

    def load(self, payload: Mapping[str, Any]) -> None:
        """Get ready for a plan. A new one to train on replaces all that were loaded; any other works on
        the parameters of that one."""
        for reference in payload.get("imports", ()):
            import_reference(reference)
        if self.transport is None:
            spare_compiler()  # of operators, too, that a file of the user's has registered by now
        given, name = payload["plan"], payload["name"]
        plan = given if isinstance(given, Plan) else plan_from_json(given)
        if name == "train":
            self.at = None
            self.begun.clear()
            self.lent = self.recording = None
            self.workers.clear()
            self.readers.clear()
            clear(self.cells)
            if self.device.type == "cuda":
                gc.collect()  # a Worker and its prepared tasks hold each other, and memory
                torch.cuda.reset_peak_memory_stats(self.device)
        self.workers[name] = Worker(
            plan,
            self.rank,
            bodies=payload["bodies"],
            transport=self._transport(plan, payload),
            device=str(self.device),
            cells=self.cells,
            shares=self.workers.get("train") if name != "train" else None,
            stored=_stored(payload.get("stored")),
            memory=payload.get("memory"),
            given=payload.get("given"),
            compile=payload.get("compile", False),
        )

    def _transport(self, plan: Plan, payload: Mapping[str, Any]) -> Transport:
        if payload.get("rehearses"):
            return NullTransport(str(self.device))
        return self.transport or DistributedTransport(self.communicators, plan)

    def links(self, partitions: Sequence[Groups]) -> LinkTimes:
        """What communication takes, in groups of these partitions; all ranks measure together."""
        return LinkTimes() if self.transport else measure_links(self.device, partitions)

    def plan_hash(self, name: str) -> str:
        """Of the plan with this role."""
        return self.workers[name].plan.content_hash()

    def prepare_step(self, payload: Mapping[str, Any]) -> tuple[Worker, Mapping[str, Tensor]]:
        """The Worker of a plan, and the leaves that were sent, else the batch that was fetched."""
        name = payload["name"]
        self.at = worker = self.workers[name]
        if payload["options"]:
            worker.set_options(payload["options"])
        leaves, guard = payload["leaves"], payload.get("guard", "")
        if guard == "check" and leaves is None:
            leaves = self.taken
        elif leaves is None:
            reader = self.readers[payload["reader"]]
            leaves = reader.take() if reader else {}
        self.taken = leaves if guard else {}
        worker.guard.prepare(on=guard == "skip", checked=guard == "check")
        begin(self.cells, list(self.workers).index(name))
        return worker, leaves

    def step(self, payload: Mapping[str, Any] | None) -> dict[str, Any]:
        """Run a plan once, or only begin to; without a payload, wait for what was begun first."""
        if payload is None:
            return self.finish_step()
        worker, leaves = self.prepare_step(payload)
        with profiled(payload.get("trace"), self.rank):
            self.begun.append(worker.begin(leaves))
            return {} if payload.get("ahead") else self.finish_step()

    def finish_step(self) -> dict[str, Any]:
        """What the step that was begun first has to say."""
        try:
            found = self.begun.popleft().get()
        except BaseException:
            self.begun.clear()  # nobody asks for those behind it
            raise
        if not self.begun:
            end(self.cells)
        return found

    def record(self, payload: Mapping[str, Any]) -> None:
        """Have the tasks of a plan note their times, from now on; all ranks are asked together."""
        worker, tie = self.workers[payload["name"]], self._tie()
        recorder: Recorder
        if self.device.type == "cuda":
            recorder = DeviceRecorder(worker, payload["steps"])
        else:
            recorder = HostRecorder(worker)
        self.recording = recorder, tie

    def recorded(self, _: object = None) -> RankTimes:
        """What they have noted, by the clock of all ranks; no task notes anything any more."""
        assert self.recording is not None
        (recorder, before), self.recording = self.recording, None
        recorder.end()
        return recorder.times(before.until(self._tie()))

    def drop_recording(self, _: object = None) -> None:
        """Note nothing any more, if anything is noted."""
        if self.recording is not None:
            (recorder, _), self.recording = self.recording, None
            recorder.end()

    def _tie(self) -> Tie:
        """Of this rank's clock to that of all ranks; those of one process have one."""
        return own_tie() if self.transport else common_tie()

    def read(self, payload: Mapping[str, Any]) -> None:
        """From now on, or again from its start, read this data rank's share from a function."""
        worker = self.workers[payload["name"]]
        plan, rank = worker.plan, worker.me.data_rank
        reader = None
        if worker.batch_slots:
            mark = payload["marks"][rank] if payload["marks"] else None
            function, num = function_of(payload["function"]), plan.num_data_ranks
            policy = payload["policy"]
            reader = Reader(function, plan, rank=rank, num_ranks=num, mark=mark, policy=policy)
            reader.begin()
        self.readers[payload["name"]] = reader

    def fetch(self, name: str) -> Fetched | None:
        """Read the next batch: its shapes, if there was one, or None if this rank needs none."""
        reader = self.readers[name]
        return reader.fetch() if reader else None

    def loader_state(self, name: str) -> tuple[int, dict[str, Any] | None] | None:
        """The data rank, and what its loader says of itself, if it does; None if it needs no batch."""
        reader = self.readers[name]
        return (reader.rank, reader.state()) if reader else None

    def describe(self, _: object = None) -> dict[str, str]:
        """The device: its name, an identity that no other device has, and the rank's part of it."""
        return device_facts(self.device)

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """A copy of each on the CPU: a view would be sent with the memory of its whole bucket."""
        held = self.workers["train"].tensors(kind)
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in held.items()}

    def bytes_read(self, _: object = None) -> int:
        """From files of weights."""
        return self.workers["train"].weights.reader.num_bytes

    def lend(self, elements: Mapping[str, Tensor]) -> None:
        """Have parameters hold these values until `take_back`."""
        self.lent = Lent(self.workers["train"], elements)

    def take_back(self, _: object = None) -> None:
        """Have parameters hold their own values again."""
        if self.lent is not None:
            self.lent.give_back()
            self.lent = None

    def save(self, payload: Mapping[str, Any]) -> float:
        """Copy what this rank writes of the state, and begin to write it; seconds that took."""
        entries = msgspec.json.decode(payload["entries"], type=list[Entry])
        self.writing = Writing(self.workers["train"], entries, payload["folder"])
        return self.writing.seconds

    def saved(self, _: object = None) -> dict[str, Any] | None:
        """What was written where; None as long as it is being written."""
        return self.writing.result() if self.writing else None

    def settled(self, _: object = None) -> int | None:
        """How many steps this rank has done all of; None if none of them changes what it holds."""
        return self.workers["train"].settled_steps()

    def write_weights(self, payload: Mapping[str, Any]) -> str:
        """Write this rank's part of the weights into files that are there; why it cannot, or nothing."""
        entries = msgspec.json.decode(payload["entries"], type=list[Entry])
        places = msgspec.json.decode(payload["places"], type=dict[str, Place])
        return write_weights(self.workers["train"], entries, places, payload["folder"])

    def memory(self, _: object = None) -> dict[str, int]:
        """Bytes by what they are for, measured on live storages, and the most that was in use."""
        return measured_bytes(self.workers["train"])

    def look(self) -> None:
        """Note on the board what a device is busy with, which its host does not see."""
        for worker in list(self.workers.values()):
            worker.order.look()

    def answer(self, name: str, payload: Any) -> tuple[str, Any]:
        """Run a command; whatever happens becomes a message."""
        try:
            return "ok", getattr(self, name)(payload)
        except Exception as error:
            lost = isinstance(error, PeerError | dist.DistError)
            return "lost" if lost else "error", told(error, name, self.at)


def _stored(given: Any) -> StoredState | None:
    """What a run starts from, if it is given; it travels as JSON."""
    return given if given is None else msgspec.json.decode(given, type=StoredState)


def told(error: Exception, command: str, worker: Worker | None = None) -> dict[str, Any]:
    """What others are told of an error; where memory ran out, who has it."""
    text = error.message if isinstance(error, PiperError) else f"{type(error).__name__}: {error}"
    text = text.partition("\nException raised from ")[0]  # without torch's own stack
    facts: dict[str, Any] = {
        "error": re.sub(r"\[enforce fail at \S+\] .*?\. ", "", text).strip(),
        "command": command,
        "trace": traceback.format_exc().strip().splitlines(),
    }
    if out_of_memory(error):
        held = bytes_by_use(worker) if worker else {}
        facts["memory"] = {"held": held, "largest": largest(worker, 5) if worker else []}
    return facts


def join(
    rank: int,
    *,
    num_ranks: int,
    timeout: float,
    init_method: str | None = None,
    store: dist.Store | None = None,
) -> None:
    """Become a rank of the default group, which meets by `init_method` or at `store`. It moves no
    training data; groups of plans do."""
    dist.init_process_group(
        "gloo",
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=timeout),
    )


def leave() -> None:
    """Give up all communicators without waiting for others."""
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except RuntimeError as error:  # a peer was faster
            print(f"leaving: {error}", file=sys.stderr)
