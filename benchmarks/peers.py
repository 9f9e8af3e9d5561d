"""Piper beside its peers: DDP, FSDP2, pipelines with FSDP2, torch.distributed.pipelining, experts by
hand and, where they are installed, DeepSpeed and Megatron-core's layers, in turn in one run.

A row is one way to train, by Piper and by the peers that offer it: the same model, batches, precision,
optimizer and transport, losses of three steps that equal those of one process. `--regimes masters,pure`:
float32 masters and reductions on both sides, or bfloat16 alone on both. Sides take turns, step by step
on a CPU; on a GPU, where they do not fit together, launch by launch. A run leaves out the rows that its
file has, and starts none after `--seconds`: call it again to go on. Without a GPU, `--device cpu`
runs a small float32 model over gloo. Of a side that fails, the table says how; its row goes on.

`within` is Piper under the memory that the fastest peer took, where that makes another plan.
`exposed` is the time in which a rank communicates and computes nothing, of the rank that has most of it;
the `limit` is the larger of what a rank computes and what it moves at the best rate seen, in Piper's own
recording, and behind it how many times as long a step is.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import megatron_layers
import torch
from deepspeed_zero import is_installed
from initial_weights import weights_file
from peer_sides import BEGIN, Kept, Side, seen, tell
from shared_gpu import LARGE, RANKS, SMALL, PiperSide, TorchSide, check
from torch_parallel import REGIMES
from torch_variants import num_stages
from transformer import Sizes, Transformer, make_batch, step

import piper
from piper.api.job import Job
from piper.cost.machine_file import save_machine
from piper.errors import PiperError
from piper.training.profile import with_groups

PRECISION = {"masters": "bf16", "pure": "bf16-pure"}
MIXED = replace(LARGE, layers=8, microbatches=16, experts=True)
MIXED_SMALL = replace(SMALL, layers=8, microbatches=16, experts=True)
BUCKET = "150MiB"
COMPARED = 3  # steps whose losses must be those of one process
FAILURES = (RuntimeError, PiperError)  # of torch's ranks, of Piper


@dataclass(frozen=True)
class Row:
    """One way to train: what Piper's `parallel` is given, and the peers by their names."""

    name: str
    strategy: dict[str, Any]
    peers: tuple[str, ...]
    stages: int = 1
    experts: bool = False
    modules: bool = False  # whether layers are made of modules
    ranks: int = RANKS
    compile: bool = False
    within: bool = False  # whether Piper also has to do with a peer's memory
    finer: bool = False  # whether it may then take twice as many microbatches, half as large
    halved: bool = (
        False  # whether microbatches are half as large and twice as many: DDP needs it to fit
    )
    wanted: float = 1.0  # of the fastest peer's time


def _both(zero: int, *peers: str) -> Row:
    options = {"pp": 2, "dp": 2, "zero": zero, "microbatches": 4, "schedule": "1f1b"}
    wanted = 0.7 if zero == 3 else 0.75
    return Row(f"PP2 x DP2 ZeRO-{zero}", options, peers, stages=2, within=True, wanted=wanted)


def _tensors(tp: int, sequence: bool) -> Row:
    """Microbatches one after the other, on as many data ranks as are left."""
    dp = RANKS // tp
    options = {"tp": tp, "sp": sequence, "dp": dp, "microbatches": 8 // dp}
    name = f"TP{tp}" + (f" x DP{dp}" if dp > 1 else "") + (" with sequences" if sequence else "")
    peer = f"tp{tp}{'_sp' if sequence else ''}"
    return Row(name, options, (peer, f"megatron:{peer}"), modules=True, within=True, finer=True)


def _experts(schedule: str, *peers: str) -> Row:
    options = {"pp": 2, "dp": 2, "ep": 2, "microbatches": 8, "schedule": schedule}
    return Row(
        f"experts PP2 x EP2 {schedule}", options, peers or (f"experts:{schedule}",),
        stages=num_stages(schedule, 2), experts=True, wanted=0.95 if schedule == "1f1b" else 0.8,
        within=True, finer=True,
    )  # fmt: skip


def _pipeline(schedule: str) -> Row:
    options = {"pp": RANKS, "microbatches": 8, "schedule": schedule}
    return Row(
        f"PP4 {schedule}, compiled", options, (f"pp:{schedule}",),
        stages=num_stages(schedule, RANKS), compile=True, within=True,
    )  # fmt: skip


def _own_stages(schedule: str, peer: str) -> Row:
    """Stages that Piper cuts; a peer's hand-made ones are of whole layers."""
    name = f"PP4 {schedule}, own stages, compiled"
    return replace(_pipeline(schedule), name=name, peers=(f"pp:{peer}",), stages=0)


def recorded_costs(sizes: Sizes) -> dict[str, float]:
    """What a layer and the head took in recorded steps of tagged stages, milliseconds a microbatch."""
    return {f"layers.{number}": 12.5 for number in range(sizes.layers)} | {"head": 11.6}


ROWS = (
    Row("one rank", {"microbatches": 8}, ("plain",), ranks=1),
    Row("one rank, compiled", {"microbatches": 8}, ("plain",), ranks=1, compile=True, within=True),
    Row("DP4", {"dp": 4, "microbatches": 4}, ("ddp",), halved=True),
    Row(
        "DP4 ZeRO-3", {"dp": 4, "zero": 3, "bucket_size": BUCKET, "microbatches": 2},
        ("fsdp2", "deepspeed:3"), within=True, wanted=0.85,
    ),
    _both(1, "pp_fsdp2_whole"),
    _both(2, "pp_fsdp2_whole", "pp_fsdp2"),
    _both(3, "pp_fsdp2"),
    *(_tensors(tp, sequence) for tp in (4, 2) for sequence in (False, True)),
    *(_experts(schedule) for schedule in ("1f1b", "interleaved_1f1b")),
    # Torch's own DualPipeV fails with experts (2.11): the best schedules of both sides.
    _experts("dualpipev", "experts:1f1b", "experts:interleaved_1f1b"),
    *(_pipeline(schedule) for schedule in ("1f1b", "zbv", "dualpipev")),
    replace(_pipeline("zb_h2"), peers=("pp:1f1b",), stages=RANKS),  # torch has none of that name
    _own_stages("zb_h2", "1f1b"),
    _own_stages("dualpipev", "dualpipev"),
)  # fmt: skip


@dataclass
class Options:
    """What was asked for on the command line."""

    device: str
    steps: int
    warmup: int
    compile: bool
    rounds: int
    sizes: Sizes = LARGE  # of the row under way
    machine: str | None = None  # that Piper plans for
    traces: str | None = None  # a folder for what was seen of each side


def options_of(row: Row, regime: str, options: Options) -> Options:
    """With what the row wants."""
    sizes = sizes_of(row, regime, options)
    return replace(options, sizes=sizes, compile=options.compile or row.compile)


def sizes_of(row: Row, regime: str, options: Options) -> Sizes:
    small = options.device == "cpu"
    found = (MIXED_SMALL if small else MIXED) if row.experts else (SMALL if small else LARGE)
    if row.halved:
        rows = max(1, found.rows // 2)
        found = replace(found, rows=rows, microbatches=2 * found.microbatches)
    found = replace(found, modules=row.modules)
    return replace(found, dtype="bfloat16" if regime == "pure" and not small else "float32")


@cache
def traced(sizes: Sizes, stages: int) -> piper.Program:
    written = replace(sizes, dtype="float32")  # the precision says what it computes in
    return piper.trace(lambda: Transformer(written, stages), make_batch(written), step)


def weights(options: Options) -> str:
    return weights_file(replace(options.sizes, dtype="float32"))


def lower(row: Row, regime: str, options: Options, limit: float | None = None, **more: Any) -> Job:
    cuda = options.device == "cuda"
    if not row.stages:
        more["costs"] = recorded_costs(options.sizes)
    strategy = piper.strategies.parallel(**row.strategy, **more)
    program = traced(options.sizes, row.stages).apply(strategy)
    return program.lower(
        optimizer=piper.adamw(lr=1e-4, **({"fused": True} if cuda else {})),
        device=options.device,
        precision=PRECISION[regime] if cuda else None,
        memory_limit=None if limit is None else int(limit),
        machine=options.machine if row.ranks > 1 else None,
        weights=weights(options),
    )


def measure_links(path: str, kept: Kept) -> None:
    """What links take between pairs of ranks and between all, into a file, if it is not there."""
    if not os.path.exists(path):
        begin = time.monotonic()
        machine = with_groups(kept.pool(), [[(0, 1), (2, 3)], [(0, 1, 2, 3)]])
        save_machine(machine, path)
        tell(f"links measured in {time.monotonic() - begin:.0f} s: {machine.lanes:.2f} lanes")


def first_losses(row: Row, regime: str, options: Options, kept: Kept, known: Any) -> list[float]:
    """Those of one process; once per model and regime."""
    key = f"{options.sizes}@{regime}"
    if not isinstance(known.get(key), list):
        tell(f"{row.name}, {regime}: one process")
        kept.use(row.ranks, options.sizes, weights(options))
        known[key] = kept.first_losses(regime, COMPARED)
    return known[key]


class Failed(Exception):
    """A side has: its record says how, and all processes have ended."""


class Turns:
    """The sides of a row under way, and what was found of each by its name."""

    def __init__(
        self, row: Row, regime: str, options: Options, kept: Kept, losses: list[float]
    ) -> None:
        self.row, self.regime, self.options, self.kept = row, regime, options, kept
        self.losses = losses
        self.jobs: dict[str, Job] = {}  # of Piper's sides
        self.sides: dict[str, dict[str, Any]] = {}
        self.found = {"row": row.name, "regime": regime, "losses": losses, "sides": self.sides}

    def run(self) -> dict[str, Any]:
        """Piper and the row's peers in turn."""
        options = self.options
        peers = [peer for peer in self.row.peers if self._offered(peer)]
        names = [*(f"{peer}@{self.regime}" for peer in peers), "piper"]
        for name in names:
            self.sides[name] = {"ms": [], "peak": 0.0}
        if options.device == "cpu":
            self._take(names, turns=options.rounds * options.steps, steps=1)
            return self.found
        for number in range(options.rounds):
            for name in names:
                self._take([name], turns=1, steps=options.steps)
            if number == 0 and self.row.within and self._add_within():
                names.append("within")
                self._take(["within"], turns=1, steps=options.steps)
        return self.found

    def _offered(self, peer: str) -> bool:
        if peer.startswith("megatron"):
            return megatron_layers.is_installed()
        # DeepSpeed keeps masters in any case.
        return not peer.startswith("deepspeed") or (is_installed() and self.regime == "masters")

    def _take(self, names: list[str], *, turns: int, steps: int) -> None:
        """Steps of some sides in turn. When one fails, the others begin again without it."""
        names = [name for name in names if "failed" not in self.sides[name]]
        if not names:
            return
        self.kept.use(self.row.ranks, self.options.sizes, weights(self.options))
        made: dict[str, Side] = {}
        times: dict[str, list[float]] = {name: [] for name in names}
        more: dict[str, dict[str, Any]] = {}
        try:
            for name in names:
                with self._attempt(name):
                    made[name] = self._made(name)
            for name in names * turns:
                with self._attempt(name):
                    times[name] += made[name].steps(steps)[1]
            for name in names:
                with self._attempt(name):
                    more[name] = seen(made[name], self._label(name), self.options.traces)
        except Failed:
            self._take(names, turns=turns, steps=steps)
            return
        for name in names:
            self._note(name, times[name], **more[name])
        try:
            for side in made.values():
                side.close()
        except FAILURES:
            self.kept.close()

    @contextlib.contextmanager
    def _attempt(self, name: str) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            self.sides[name]["failed"] = str(error).partition("\n")[0]
            self._tell(f"{name} failed: {error}")
            self.kept.close()
            raise Failed from error

    def _made(self, name: str) -> Side:
        """A side that is warm, and whose first losses are right, before steps and after them."""
        made: Side
        if "@" in name:
            ranks = self.kept.torch(compiles=self.options.compile)
            begin = time.monotonic()
            made = TorchSide(ranks, name, self.options)
        else:
            job, pool = self._job(name), self.kept.pool()
            begin = time.monotonic()
            made = PiperSide(job, pool, self.options)
        (first,), _ = made.steps(1)
        self.sides[name].setdefault("start_s", time.monotonic() - begin)
        losses = [first, *made.steps(COMPARED - 1)[0]]
        for number, (loss, wanted) in enumerate(zip(losses, self.losses, strict=True)):
            check(f"{self.row.name}, {name}", loss, wanted, self.options, step=number)
        made.steps(max(0, self.options.warmup - COMPARED))
        return made

    def _job(self, name: str) -> Job:
        if name not in self.jobs:
            if self.options.machine and self.row.ranks > 1:
                measure_links(self.options.machine, self.kept)
            self._tell("lowering")
            self.jobs[name] = lower(self.row, self.regime, self.options)
            self.found["summary"] = self.jobs[name].summary()
        return self.jobs[name]

    def _add_within(self) -> bool:
        """Whether Piper has another plan for the memory that the fastest peer took."""
        mine = self.sides["piper"]
        peers = [s for name, s in self.sides.items() if "@" in name and "failed" not in s]
        if "failed" in mine or not peers:
            return False
        limit = min(peers, key=lambda side: statistics.median(side["ms"]))["peak"]
        # What kernels take for themselves is in no plan.
        limit -= max(0.0, mine["peak"] - max(p.total for p in self.jobs["piper"].report.peaks))
        try:
            job = self._within(limit)
        except PiperError as error:
            self.sides["within"] = {"ms": [], "peak": 0.0, "refused": str(error)}
            return False
        if job.plan.classes == self.jobs["piper"].plan.classes:
            return False
        self.jobs["within"], self.sides["within"] = job, {"ms": [], "peak": 0.0}
        self.found["within"] = {"limit": limit, "summary": job.summary()}
        return True

    def _within(self, limit: float) -> Job:
        """By Piper's own choices, or with what is cheap computed again; on the machine that is planned
        for the fastest, where a row may take finer microbatches."""
        try:
            jobs = [lower(self.row, self.regime, self.options, limit)]
        except PiperError:
            jobs = [lower(self.row, self.regime, self.options, limit, recompute="expensive")]
        if self.row.finer:
            strategy = self.row.strategy | {"microbatches": 2 * self.row.strategy["microbatches"]}
            finer = replace(self.row, strategy=strategy)
            jobs.append(lower(finer, self.regime, self.options, limit))
        machine = self.options.machine
        return min(jobs, key=lambda job: job.simulate(machine, steps=1).step_seconds[0])

    def _note(self, name: str, times: list[float], peak: float, **more: Any) -> None:
        side = self.sides[name]
        side |= {"ms": side["ms"] + times, "peak": max(side["peak"], peak), **more}
        self._tell(f"{name.partition('@')[0]} {statistics.median(times):.0f} ms")

    def _label(self, name: str) -> str:
        """Of a file."""
        return re.sub(r"[^a-zA-Z0-9_@]+", "-", f"{self.row.name}_{self.regime}_{name}")

    def _tell(self, text: str) -> None:
        tell(f"{self.row.name}, {self.regime}: {text}")


HEAD = (
    "| row | side | ms a step | steps | tokens/s | peak of a rank | exposed | limit | Piper / it |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def lines(found: dict[str, Any], tokens: int) -> Iterator[str]:
    piper = found["sides"]["piper"]
    mine = None if "failed" in piper else statistics.median(piper["ms"])
    for name, side in found["sides"].items():
        head = f"| {found['row']} | {name.partition('@')[0]} |"
        if "failed" in side or "refused" in side:
            why = f"failed: {side['failed']}" if "failed" in side else side["refused"]
            yield f"{head} {why.splitlines()[0]} | | | | | | |"
            continue
        middle = statistics.median(side["ms"])
        ratio = "" if mine is None else f"{mine / middle:.3f}"
        yield (
            f"{head} {middle:.0f} "
            f"| {min(side['ms']):.0f} to {max(side['ms']):.0f} | {1e3 * tokens / middle:,.0f} "
            f"| {side['peak'] / 2**30:.2f} GiB | {_bare(side, name)} | {_bound(side)} | {ratio} |"
        )


def _bare(side: dict[str, Any], name: str) -> str:
    """Earlier files have Piper's exchanges added up, also where two went on at once."""
    if "bare_ms" in side:
        return f"{side['bare_ms']:.0f} ms"
    if "exposed_ms" not in side:
        return ""
    return f"{'' if '@' in name else '≤ '}{side['exposed_ms']:.0f} ms"


def _bound(side: dict[str, Any]) -> str:
    """Also how much longer a step is. Earlier files have a limit that is none where exchanges beside
    each other are faster than one."""
    middle = statistics.median(side["ms"])
    least = side.get("bound_ms", side.get("limit_ms"))
    if least is None or least > middle:
        return ""
    return f"{least:.0f} ms ({middle / least:.2f})"


def table(found: dict[str, Any], options: Options) -> str:
    sections = []
    for regime in REGIMES:
        rows = [each for each in found["rows"].values() if each["regime"] == regime]
        parts = [f"## {regime}\n", HEAD]
        for each in rows:
            row = next(r for r in ROWS if r.name == each["row"])
            sizes = sizes_of(row, regime, options)
            tokens = sizes.microbatches * sizes.rows * sizes.length
            parts += lines(each, tokens)
        if rows:
            sections.append("\n".join(parts))
    return "\n\n".join(sections)


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", default="", help="names or parts of them, as in A,B")
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--json", default="peers.json", metavar="FILE", help="goes on from it")
    parser.add_argument(
        "--machine", help="what `piper profile --out` wrote, for Piper's choices; else links are "
        "measured and written there",
    )  # fmt: skip
    parser.add_argument("--traces", metavar="FOLDER", help="Piper's timelines, peers' profiles")
    parser.add_argument("--page", nargs="+", metavar="FILE", help="only make docs/peers.md")
    parser.add_argument("--seconds", type=float, default=480, help="start no row after them")
    return parser.parse_args()


def chosen(asked: str) -> list[Row]:
    """Rows by their names, or by parts of names that are none; in the order that they are asked for."""
    known = {row.name for row in ROWS}
    parts = re.split(r",(?! )", asked)  # names have commas, too
    rows = {
        row.name: row
        for part in parts
        for row in ROWS
        if (part == row.name if part in known else part in row.name)
    }
    return list(rows.values())


def main() -> None:
    asked = arguments()
    options = Options(
        asked.device, asked.steps, asked.warmup, asked.compile, asked.rounds,
        machine=asked.machine, traces=asked.traces and os.path.abspath(asked.traces),
    )  # fmt: skip
    if options.traces:
        os.makedirs(options.traces, exist_ok=True)
    if asked.page:
        from peers_page import write

        write(asked.page, options)
        return
    found: dict[str, Any] = {"rows": {}}
    if os.path.exists(asked.json):
        found = json.loads(Path(asked.json).read_text())
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found |= {"torch": torch.__version__, "device": name, "compile": options.compile}
    losses = found.setdefault("losses", {})
    pairs = [(regime, row) for regime in asked.regimes.split(",") for row in chosen(asked.rows)]
    left = []
    with Kept(options.device) as kept:
        for regime, row in sorted(pairs, key=lambda pair: pair[1].ranks):
            key = f"{row.name}@{regime}"
            if key in found["rows"]:
                continue
            if time.monotonic() - BEGIN > asked.seconds:
                left.append(key)
                continue
            mine = options_of(row, regime, options)
            wanted = first_losses(row, regime, mine, kept, losses)
            Path(asked.json).write_text(json.dumps(found, indent=1))
            found["rows"][key] = Turns(row, regime, mine, kept, wanted).run()
            Path(asked.json).write_text(json.dumps(found, indent=1))
            print("\n".join(lines(found["rows"][key], 1)), flush=True)
    print(f"torch {found['torch']}, {found['device']}\n\n{table(found, options)}")
    if left:
        print(f"\n{len(left)} rows are left, call again: {', '.join(left)}")


if __name__ == "__main__":
    main()
