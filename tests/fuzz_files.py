"""Damaged files: each ends in one Piper error, or is accepted and means what it says.

    python -m tests.fuzz_files --cases 3000 --seed 0

runs so many cases in processes that may use 1 GB more than they start with. A case that fails is written
to a folder with its error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import piper
from piper.api.job_file import job_to_json
from piper.api.program_file import program_from_json
from piper.bodies.files.codec import content_hash, decode, encode, load
from piper.check import expanded, problems
from piper.cli.main import main
from piper.cost.presets import MACHINES
from piper.observe.timeline import Timeline
from piper.observe.timeline_files import load_timeline, to_bytes
from piper.observe.timeline_files import to_json as timeline_to_json
from piper.observe.timeline_output import save_timeline
from piper.plan.report.track_memory import fill_memory
from piper.plan.types import class_of, plan_from_json
from piper.schedules import parse_json, read_table, schedule
from piper.sim.simulate import simulate
from piper.strategies import from_json, parallel, to_json
from tests.file_verdicts import Failed, accepted, ended
from tests.fuzz_stored import good, try_checkpoint, try_weights
from tests.mutations import mutate
from tests.plans import plan_of
from tests.zoo import ADAMW, program_of

HERE = Path(__file__).parent
SECONDS = 5.0
GIGABYTE = 1 << 30
PLANS = ("dp", "ep", "clipped", "zero1", "zero3", "pp", "wire_zero2")


def try_plan(path: Path, rng: Random, original: str) -> bool:
    plan = plan_of(original)
    names = [task.name for part in plan.classes for task in part.tasks]
    good = path.with_suffix(".good")
    good.write_bytes(plan.to_json())
    accepted(ended(lambda: main(["explain", str(path), rng.choice(names)])))
    pair = [str(good), str(path)]
    accepted(ended(lambda: main(["diff", *rng.sample(pair, 2)])), legal=(0, 1))
    limit = rng.choice(([], ["--memory-limit", "1GiB"]))
    if not accepted(ended(lambda: main(["check", str(path), *limit]))):
        return False
    found = plan_from_json(path.read_bytes())
    if plan_from_json(found.to_json()) != found:
        raise Failed("an accepted plan is not read again as it was written")
    if found.mesh.size <= 64 and problems(expanded(found)):
        raise Failed(f"accepted, but of its ranks: {problems(expanded(found))[0]}")
    return True


def try_schedule(path: Path, rng: Random, original: str) -> bool:
    form = rng.choice(("text", "csv", "json", "svg"))
    if not accepted(ended(lambda: main(["schedule", str(path), "--format", form]))):
        return False
    table = read_table(path)
    again = path.with_name("again.csv")
    again.write_text(table.as_csv())
    if read_table(again).rows != table.rows:
        raise Failed("an accepted table is not read again as it was written")
    return True


def try_strategy(path: Path, rng: Random, original: str) -> bool:
    def plan() -> int:
        program_of(original).apply(from_json(path)).lower(optimizer=ADAMW)
        return 0

    return accepted(ended(plan))


def try_body(path: Path, rng: Random, original: str) -> bool:
    def run() -> int:
        text = path.read_bytes().decode(errors="surrogateescape")
        load(text)
        module = decode(text)
        constants = dict(module.named_buffers())
        again = encode(module.graph, constants)
        if encode(decode(again).graph, dict(decode(again).named_buffers())) != again:
            raise Failed("an accepted body is not read again as it was written")
        return 0

    return accepted(ended(run))


def try_job(path: Path, rng: Random, original: str) -> bool:
    """Half of the time under the right names for its bodies, so that they are looked at."""
    if rng.random() < 0.5:
        with contextlib.suppress(Exception):
            path.write_text(json.dumps(_renamed_bodies(json.loads(path.read_bytes()))))

    def run() -> int:
        job = piper.load_job(path)
        again = path.with_name("again.json")
        job.save(again, evaluation=bool(job.plan.train and (job._evaluation or job._variants)))
        if piper.load_job(again).plan != job.plan:
            raise Failed("an accepted job is not read again as it was written")
        return 0

    return accepted(ended(run))


def _renamed_bodies(file: Any) -> Any:
    names = {name: content_hash(text) for name, text in file["code"].items()}
    text = json.dumps({**file, "code": {}})
    for name, new in names.items():
        text = text.replace(name, new)
    return json.loads(text) | {"code": {names[name]: body for name, body in file["code"].items()}}


def try_program(path: Path, rng: Random, original: str) -> bool:
    def run() -> int:
        program = piper.load_program(path)
        program.as_text()
        program.history_as_code()
        program.preview()
        if program_from_json(program.to_json()) != program_from_json(path.read_bytes()):
            raise Failed("an accepted program is not written again as it was read")
        return 0

    return accepted(ended(run))


def try_timeline(path: Path, rng: Random, original: str) -> bool:
    good = path.with_suffix(".good")
    save_timeline(_simulated(original, by_rank=True), good)
    accepted(ended(lambda: main(["diff", *rng.sample([str(good), str(path)], 2)])), legal=(0, 1))
    question = rng.choice(
        ([], ["--path"], ["--memory", "0"], ["--at", "0:0.1"], ["--what-if", "F=0"])
    )
    if not accepted(ended(lambda: main(["explain", str(path), *question]))):
        return False
    found = load_timeline(path)
    for form in (".json", ".timeline"):
        again = path.with_name(f"again{form}")
        save_timeline(found, again)
        if load_timeline(again) != found:
            raise Failed("an accepted timeline is not read again as it was written")
    return True


@dataclass(frozen=True)
class Seed:
    """A good file; `original` names what it was made of."""

    kind: str
    suffix: str
    data: bytes
    original: str = ""


TRIES: dict[str, Callable[[Path, Random, str], bool]] = {
    "plan": try_plan,
    "schedule": try_schedule,
    "strategy": try_strategy,
    "body": try_body,
    "job": try_job,
    "program": try_program,
    "checkpoint": try_checkpoint,
    "weights": try_weights,
    "timeline": try_timeline,
}
SHARES = {
    "plan": 9,
    "schedule": 6,
    "strategy": 2,
    "body": 5,
    "job": 2,
    "program": 3,
    "checkpoint": 3,
    "weights": 4,
    "timeline": 5,
}  # how often each kind is drawn


@cache
def seeds() -> dict[str, list[Seed]]:
    found: dict[str, list[Seed]] = {
        "plan": [Seed("plan", ".json", plan_of(name).to_json(), name) for name in PLANS],
        "schedule": _schedules(),
        "strategy": _strategies(),
        "body": _bodies(),
        "job": [Seed("job", ".json", _job_bytes())],
        "program": _programs(),
        "checkpoint": _stored("saved"),
        "weights": _stored("saved", "shards", "torch", "dcp"),
        "timeline": _timelines(),
    }
    return found


def _schedules() -> list[Seed]:
    tables = sorted((HERE / "null" / "conformance" / "tables").glob("*.csv"))
    found = [Seed("schedule", ".csv", path.read_bytes()) for path in tables[::4]]
    for name in ("1f1b", "dualpipe", "zbv"):
        table = schedule(name, num_ranks=2, num_microbatches=4)
        found.append(Seed("schedule", ".csv", table.as_csv().encode()))
        rows = [[str(cell) for cell in row] for row in table.rows]
        forms = [{"name": name, "version": 1, "num_ranks": 2, "rows": rows}, rows]
        for form in forms:
            parse_json(json.dumps(form), name=name)
            found.append(Seed("schedule", ".json", json.dumps(form, indent=1).encode()))
    return found


def _strategies() -> list[Seed]:
    file = HERE / "null" / "strategies_json" / "two_stages.json"
    program = program_of("tied").apply(parallel(dp=2, ep=2, microbatches=2))
    return [
        Seed("strategy", ".json", file.read_bytes(), "moe"),
        Seed("strategy", ".json", to_json(program).encode(), "tied"),
    ]


@cache
def _job() -> piper.Job:
    strategy = parallel(pp=2, dp=2, ep=2, zero=2, microbatches=2)
    return program_of("tied").apply(strategy).lower(optimizer=ADAMW)


def _job_bytes() -> bytes:
    job = _job()
    return job_to_json(job.plan, {**job.bodies, **job.evaluation().bodies}, job.evaluation().plan)


def _bodies() -> list[Seed]:
    return [Seed("body", ".json", text.encode()) for text in _job().bodies.values()]


def _programs() -> list[Seed]:
    strategies = (parallel(dp=2, ep=2, microbatches=2), parallel(pp=2, microbatches=2, zero=1))
    programs = [program_of("tied").apply(strategy) for strategy in strategies]
    return [Seed("program", ".json", program.to_json()) for program in programs]


def _timelines() -> list[Seed]:
    found = []
    for name in ("dp", "pp"):
        for by_rank in (False, True):
            timeline = _simulated(name, by_rank=by_rank)
            found.append(Seed("timeline", ".json", timeline_to_json(timeline), name))
            found.append(Seed("timeline", ".timeline", to_bytes(timeline), name))
    return found


@cache
def _simulated(name: str, *, by_rank: bool) -> Timeline:
    plan = plan_of(name)
    timeline = simulate(plan, MACHINES["cpu"], steps=2, by_rank=by_rank)
    for track in timeline.tracks:
        fill_memory(plan, class_of(plan, track.ranks[0]), track)
    return timeline


def _stored(*folders: str) -> list[Seed]:
    """Each file of these folders, with its name."""
    return [
        Seed("stored", ".file", data, f"{folder}/{name}")
        for folder in folders
        for name, data in good()[0][folder].items()
    ]


def run_case(
    number: int, folder: Path, *, kinds: Sequence[str] = tuple(SHARES)
) -> tuple[str, bool]:
    """The kind of one case and whether its file was accepted; raises Failed with what went wrong."""
    rng = Random(number)
    kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
    seed = rng.choice(seeds()[kind])
    path = folder / f"case{seed.suffix}"
    path.write_bytes(mutate(seed.data, rng))
    begin = time.process_time()
    problem, taken = "", False
    try:
        taken = TRIES[kind](path, rng, seed.original)
    except Failed:
        raise
    except BaseException as error:  # its frames may hold all memory: it ends here
        last = traceback.extract_tb(error.__traceback__)[-1]
        problem = f"{type(error).__name__}: {error} at {last.filename}:{last.lineno}"
    if problem:
        raise Failed(problem)
    seconds = time.process_time() - begin
    if seconds > SECONDS:
        raise Failed(f"it took {seconds:.1f} s")
    return kind, taken


def _batch(numbers: range, keep: Path) -> int:
    """Run cases here, within a bound on memory; prints a line of JSON for each that failed."""
    seeds()
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + GIGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for number in numbers:
            try:
                kind, taken = run_case(number, Path(folder))
                counts[kind, "accepted" if taken else "refused"] += 1
            except Failed as error:
                counts["", "failed"] += 1
                keep.mkdir(parents=True, exist_ok=True)
                for case in Path(folder).glob("case.*"):
                    case.rename(keep / f"{number}{case.suffix}")
                (keep / f"{number}.txt").write_text(str(error))
                print(json.dumps({"failed": number, "why": str(error)[:300]}), flush=True)
    print(json.dumps({"counts": [[*what, times] for what, times in counts.items()]}), flush=True)
    return 0


def _all(cases: int, seed: int, size: int, keep: Path) -> int:
    """Batches of cases, each in a process of its own with a limit of time."""
    total: Counter[tuple[str, str]] = Counter()
    for start in range(seed, seed + cases, size):
        stop = min(start + size, seed + cases)
        command = [sys.executable, "-m", "tests.fuzz_files", "--batch", str(start), str(stop)]
        begin = time.perf_counter()
        done = subprocess.run(
            [*command, "--keep", str(keep)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=300 + SECONDS * size,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for line in done.stdout.splitlines():
            found: dict[str, Any] = json.loads(line)
            if "failed" in found:
                print(line)
            for kind, how, times in found.get("counts", ()):
                total[kind, how] += times
        if done.returncode:
            total["", "failed"] += 1
            print(f"cases {start} to {stop} ended with {done.returncode}")
        print(f"cases {start}-{stop}: {time.perf_counter() - begin:.0f} s", flush=True)
    for (kind, how), times in sorted(total.items()):
        print(f"{kind:<10} {how:<9} {times}")
    return 1 if total["", "failed"] else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--size", type=int, default=500, help="cases of a process")
    parser.add_argument("--batch", type=int, nargs=2, metavar=("START", "STOP"))
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "piper-fuzz")
    arguments = parser.parse_args()
    if arguments.batch:
        sys.exit(_batch(range(*arguments.batch), arguments.keep))
    sys.exit(_all(arguments.cases, arguments.seed, arguments.size, arguments.keep))
