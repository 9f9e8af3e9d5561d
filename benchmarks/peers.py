"""Piper beside its peers: DDP, FSDP2, pipelines with FSDP2, torch.distributed.pipelining and experts by
hand, in turn in one run.

A row is one way to train, by Piper and by the peers that offer it: the same model, batches, precision,
optimizer and transport, first losses that equal those of one process. `--regimes masters,pure`:
float32 masters and reductions on both sides, or bfloat16 alone on both. Sides take turns, step by step
on a CPU; on a GPU, where they do not fit together, launch by launch. A run leaves out the rows that its
file has, and starts none after `--seconds`: call it again to go on. Without a GPU, `--device cpu`
runs a small float32 model over gloo.

`within` is Piper under the memory that the fastest peer took. `exposed` is communication beside which
a rank computes nothing, of the rank that has most of it; the `limit` is the larger of what a rank
computes and what it moves at the best rate seen, in Piper's own recording.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from shared_gpu import LARGE, RANKS, SMALL, PiperSide, TorchSide, check, torch_ranks
from torch_parallel import REGIMES
from torch_ranks import TorchRanks, start
from torch_variants import num_stages
from transformer import Sizes, Transformer, make_batch, step

import piper
from piper.api.job import Job
from piper.errors import CheckError
from piper.insight.exposed import exposed
from piper.observe.flows import Place
from piper.observe.meetings import Meetings

PRECISION = {"masters": "bf16", "pure": "bf16-pure"}
MIXED = replace(LARGE, layers=8, microbatches=16, experts=True)
MIXED_SMALL = replace(SMALL, layers=8, microbatches=16, experts=True)
BUCKET = "150MiB"
LARGE_EXCHANGE = 4 << 20  # bytes; of smaller ones latency decides


@dataclass(frozen=True)
class Row:
    """One way to train: what Piper's `parallel` is given, and the peers by their names."""

    name: str
    strategy: dict[str, Any]
    peers: tuple[str, ...]
    stages: int = 1
    experts: bool = False
    ranks: int = RANKS
    compile: bool = False
    within: bool = False  # whether Piper also has to do with a peer's memory


def _both(zero: int, *peers: str) -> Row:
    options = {"pp": 2, "dp": 2, "zero": zero, "microbatches": 4, "schedule": "1f1b"}
    return Row(f"PP2 x DP2 ZeRO-{zero}", options, peers, stages=2, within=True)


def _experts(schedule: str) -> Row:
    options = {"pp": 2, "dp": 2, "ep": 2, "microbatches": 8, "schedule": schedule}
    return Row(
        f"experts PP2 x EP2 {schedule}", options, (f"experts:{schedule}",),
        stages=num_stages(schedule, 2), experts=True,
    )  # fmt: skip


ROWS = (
    Row("one rank", {"microbatches": 8}, ("plain",), ranks=1),
    Row("one rank, compiled", {"microbatches": 8}, ("plain",), ranks=1, compile=True),
    Row("DP4", {"dp": 4, "microbatches": 2}, ("ddp",)),
    Row(
        "DP4 ZeRO-3", {"dp": 4, "zero": 3, "bucket_size": BUCKET, "microbatches": 2}, ("fsdp2",),
        within=True,
    ),
    _both(1, "pp_fsdp2_whole"),
    _both(2, "pp_fsdp2_whole", "pp_fsdp2"),
    _both(3, "pp_fsdp2"),
    *(_experts(schedule) for schedule in ("1f1b", "interleaved_1f1b", "dualpipev")),
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


def sizes_of(row: Row, regime: str, options: Options) -> Sizes:
    small = options.device == "cpu"
    found = (MIXED_SMALL if small else MIXED) if row.experts else (SMALL if small else LARGE)
    return replace(found, dtype="bfloat16" if regime == "pure" and not small else "float32")


@cache
def traced(sizes: Sizes, stages: int) -> piper.Program:
    written = replace(sizes, dtype="float32")  # the precision says what it computes in
    return piper.trace(lambda: Transformer(written, stages), make_batch(written), step)


def lower(row: Row, regime: str, options: Options, limit: float | None = None) -> Job:
    cuda = options.device == "cuda"
    program = traced(options.sizes, row.stages).apply(piper.strategies.parallel(**row.strategy))
    return program.lower(
        optimizer=piper.adamw(lr=1e-4, **({"fused": True} if cuda else {})),
        device=options.device,
        precision=PRECISION[regime] if cuda else None,
        memory_limit=None if limit is None else int(limit),
    )


def one_process(row: Row, job: Job, options: Options) -> float:
    """The first loss of the plain loop."""
    with TorchRanks(1, device=options.device) as ranks:
        start(ranks, options.sizes, job)
        ranks.ask("plain", "plain", False)
        (loss,), _ = ranks.steps("plain", 1)
    return loss


def measure(row: Row, regime: str, options: Options) -> dict[str, Any]:
    """Piper and the row's peers in turn."""
    options = replace(
        options, sizes=sizes_of(row, regime, options), compile=options.compile or row.compile
    )
    job = lower(row, regime, options)
    wanted = one_process(row, job, options)
    cuda = options.device == "cuda"
    names = [*(f"{peer}@{regime}" for peer in row.peers), "piper"]
    names += ["within"] if row.within and cuda else []
    found: dict[str, Any] = {
        "row": row.name, "regime": regime, "loss": wanted, "summary": job.summary(),
        "sides": {name: {"ms": [], "peak": 0.0} for name in names},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(torch_ranks(options, row.ranks))
        start(ranks, options.sizes, job)
        pool = piper.LocalPool(
            row.ranks, device=options.device, ranks_per_gpu=row.ranks if cuda else 1
        )
        stack.enter_context(pool)

        @contextlib.contextmanager
        def side(name: str) -> Iterator[PiperSide | TorchSide]:
            made: PiperSide | TorchSide
            if name == "piper":
                made = PiperSide(job, pool, options)
            elif name == "within":
                made = PiperSide(_within(row, regime, options, found), pool, options)
            else:
                made = TorchSide(ranks, name, options)
            try:
                (first,), _ = made.steps(1)
                check(f"{row.name}, {name}", first, wanted, options)
                made.steps(options.warmup - 1)
                yield made
            finally:
                made.close()

        def end(name: str, made: PiperSide | TorchSide) -> None:
            seen = found["sides"][name]
            seen["peak"] = max(seen["peak"], *made.peaks())
            seen |= _recorded(made) if isinstance(made, PiperSide) else made.exposed()

        if cuda:
            for _ in range(options.rounds):
                for name in names:
                    try:
                        with side(name) as made:
                            found["sides"][name]["ms"] += made.steps(options.steps)[1]
                            end(name, made)
                    except CheckError as error:  # it does not fit into the peer's memory
                        found["sides"][name]["refused"] = str(error)
        else:
            sides = {name: stack.enter_context(side(name)) for name in names}
            for _ in range(options.rounds * options.steps):
                for name, made in sides.items():
                    found["sides"][name]["ms"] += made.steps(1)[1]
            for name, made in sides.items():
                end(name, made)
    return found


def _within(row: Row, regime: str, options: Options, found: dict[str, Any]) -> Job:
    """Piper's plan for the memory that the fastest peer took so far."""
    peers = [found["sides"][f"{peer}@{regime}"] for peer in row.peers]
    fastest = min(peers, key=lambda side: statistics.median(side["ms"]))
    job = lower(row, regime, options, limit=fastest["peak"])
    found["within"] = {"limit": fastest["peak"], "summary": job.summary()}
    return job


def _recorded(side: PiperSide) -> dict[str, float]:
    """Of recorded steps: communication on the rank where most of it is exposed, and how much is, ms; and
    the least that a step could take."""
    recording = side.run.record(2)
    side.steps(2)
    timeline = recording.timeline
    last = Meetings(timeline, len(timeline.steps) - 1)
    rows = exposed(last)
    return {
        "communication_ms": 1e3 * sum(row.seconds for row in rows),
        "exposed_ms": 1e3 * sum(row.exposed for row in rows),
        "exchange_hidden": _hidden([row for row in rows if row.kind == "all_to_all"]),
        "limit_ms": 1e3 * _limit(last),
    }


def _limit(last: Meetings) -> float:
    """Of the busiest rank: what it computes, or what it moves at the best rate of a large exchange."""
    computed, moved, rate = 0.0, 0, 0.0
    for number, track in enumerate(last.timeline.tracks):
        seconds, nbytes = 0.0, 0
        for span in last.spans[number]:
            label = track.labels[track.which[span]]
            if not label.communicates:
                seconds += track.end[span] - track.start[span]
                continue
            place = Place(number, span)
            took = last.ended(place) - last.began(place)
            nbytes += label.nbytes
            if label.nbytes >= LARGE_EXCHANGE and took > 0:
                rate = max(rate, label.nbytes / took)
        computed, moved = max(computed, seconds), max(moved, nbytes)
    return max(computed, moved / rate if rate else 0.0)


def _hidden(rows: list[Any]) -> float:
    seconds = sum(row.seconds for row in rows)
    return 1 - sum(row.exposed for row in rows) / seconds if seconds else 1.0


HEAD = (
    "| row | side | ms a step | steps | tokens/s | peak of a rank | exposed | limit | Piper / it |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def lines(found: dict[str, Any], tokens: int) -> Iterator[str]:
    mine = statistics.median(found["sides"]["piper"]["ms"])
    for name, side in found["sides"].items():
        if not side["ms"]:
            yield f"| {found['row']} | {name} | {side['refused'].splitlines()[0]} | | | | | | |"
            continue
        middle = statistics.median(side["ms"])
        bare, least = (
            f"{side[key]:.0f} ms" if key in side else "" for key in ("exposed_ms", "limit_ms")
        )
        yield (
            f"| {found['row']} | {name.partition('@')[0]} | {middle:.0f} "
            f"| {min(side['ms']):.0f} to {max(side['ms']):.0f} | {1e3 * tokens / middle:,.0f} "
            f"| {side['peak'] / 2**30:.2f} GiB | {bare} | {least} | {mine / middle:.3f} |"
        )


def table(found: dict[str, Any], options: Options) -> str:
    parts = []
    for regime in REGIMES:
        rows = [each for each in found["rows"].values() if each["regime"] == regime]
        if rows:
            parts += [f"## {regime}", ""] + [HEAD]
        for each in rows:
            row = next(r for r in ROWS if r.name == each["row"])
            sizes = sizes_of(row, regime, options)
            tokens = sizes.microbatches * sizes.rows * sizes.length
            parts += lines(each, tokens)
    return "\n".join(parts)


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rows", default="", help="names that contain this")
    parser.add_argument("--regimes", default=",".join(REGIMES))
    parser.add_argument("--steps", type=int, default=4, help="of a round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--json", default="peers.json", metavar="FILE", help="goes on from it")
    parser.add_argument("--seconds", type=float, default=480, help="start no row after them")
    return parser.parse_args()


def main() -> None:
    begin = time.monotonic()
    asked = arguments()
    options = Options(asked.device, asked.steps, asked.warmup, asked.compile, asked.rounds)
    found: dict[str, Any] = {"rows": {}}
    if os.path.exists(asked.json):
        found = json.loads(Path(asked.json).read_text())
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    found |= {"torch": torch.__version__, "device": name, "compile": options.compile}
    for regime in asked.regimes.split(","):
        for row in ROWS:
            key = f"{row.name}@{regime}"
            late = time.monotonic() - begin > asked.seconds
            if asked.rows not in row.name or key in found["rows"] or late:
                continue
            found["rows"][key] = measure(row, regime, options)
            Path(asked.json).write_text(json.dumps(found, indent=1))
            left = list(lines(found["rows"][key], 1))
            print("\n".join(left), flush=True)
    print(f"torch {found['torch']}, {found['device']}\n\n{table(found, options)}")


if __name__ == "__main__":
    main()
