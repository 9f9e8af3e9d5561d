"""`piper train`: train a FILE or a saved plan, on local processes, under torchrun or on Ray."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from piper.cli.elastic_jobs import check_elastic, elastic_jobs
from piper.cli.json_output import give_back, own_stdout
from piper.cli.launch_options import LAUNCHERS, add_launch_arguments, launch_options, settle_launch
from piper.cli.lowering_options import add_lowering_arguments, lowered, refuse_with_plan
from piper.cli.machine_options import add_machine_arguments
from piper.cli.stage_lines import INTERRUPTED, note, remark, stage
from piper.cli.torchrun_starts import TERMINATED, mistaken, start_until_done
from piper.cli.user_file import add_program_arguments, import_file, load_file, trace_file
from piper.errors import FileError, OptionError, PiperError, RankLost

if TYPE_CHECKING:
    from piper.api.job import Job
    from piper.ir.history import Record as Directed
    from piper.mesh import Mesh
    from piper.training.elastic import Elastic
    from piper.training.records import Record

UNSAVED = 1


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "train",
        words="FILE.py|JOB.toml|PLAN.json --steps N [options]",
        help="train a model under a strategy, or a saved plan",
        description="Train the model of FILE.py on the ranks of a strategy: its own strategy(s), or "
        "the degrees of these options.",
        examples=(
            "piper train FILE.py --steps 100                          # one device, or its strategy(s)",
            "piper train FILE.py --steps 100 --pp 2 --dp 2 --zero 2 --microbatches 4 --clip 1",
            "piper train FILE.py --steps 100 --checkpoint RUN --every 50 --resume",
            "piper train FILE.py --steps 100 --dp 2 --watch           # follow it in a browser",
            "piper train JOB.toml --dp 4                              # options from a file, but dp",
            "piper train PLAN.json --data FILE.py --steps 100         # what piper plan --out wrote",
            "torchrun --nproc-per-node 4 -m piper train FILE.py --steps 100 --dp 4",
        ),
    )
    add_program_arguments(parser, more="; or PLAN.json, as written by piper plan --out")
    group = parser.add_argument_group("where")
    add_launch_arguments(group, tuple(LAUNCHERS))
    group.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="ranks; without a strategy, N data ranks (default: those of the strategy)",
    )
    group = add_lowering_arguments(parser)
    group.add_argument("--steps", type=int, metavar="N", help="to train, in all")
    group.add_argument(
        "--epochs", type=int, metavar="N", help="passes through data(share), in place of --steps"
    )
    group.add_argument(
        "--data",
        metavar="FILE",
        help="with PLAN.json: a Python file with data(share) or batch(), maybe validation(share)",
    )
    group.add_argument(
        "--log-every", type=int, default=1, metavar="N", help="print every Nth step (default: 1)"
    )
    group.add_argument(
        "--evaluate-every",
        type=int,
        default=0,
        metavar="N",
        help="steps between evaluations on validation(share) (default: only at the end)",
    )
    group.add_argument(
        "--on-nan",
        choices=["go-on", "skip", "stop"],
        default="go-on",
        help="gradients that are not finite: train on (default), skip the batch, or end and say which "
        "task made them",
    )
    group.add_argument(
        "--read-again",
        type=int,
        default=0,
        metavar="N",
        help="times that data which fails is tried again (default: 0)",
    )
    group.add_argument(
        "--skip-unreadable",
        type=int,
        default=0,
        metavar="N",
        help="batches that may be left out (default: 0)",
    )
    add_machine_arguments(parser.add_argument_group("machine"))
    group = parser.add_argument_group("timeline")
    group.add_argument(
        "--record",
        metavar="FILE",
        help="what every task took: .timeline, .json, .svg, .pftrace, .chrome.json",
    )
    group.add_argument(
        "--record-steps", metavar="A:B", help="from step A to before B (default: 3:6)"
    )
    group = parser.add_argument_group("live view")
    group.add_argument(
        "--watch",
        action="store_true",
        help="serve a page that follows the training, for browsers on this machine",
    )
    group.add_argument(
        "--watch-at",
        metavar="HOST:PORT",
        help="the same at this address (default: 127.0.0.1, and a port that is free)",
    )
    group.add_argument(
        "--watch-every",
        type=int,
        metavar="N",
        help="record one step in N for it, 0 for none (default: as many as take 1 %% of the time)",
    )
    group = parser.add_argument_group("checkpoints")
    group.add_argument(
        "--checkpoint", metavar="DIR", help="save into DIR, at the end and on SIGTERM"
    )
    group.add_argument(
        "--every", type=int, metavar="N", help="save every N steps, too (default: no)"
    )
    group.add_argument("--keep", type=int, metavar="K", help="keep the latest K (default: all)")
    group.add_argument(
        "--resume", action="store_true", help="go on from the latest one in DIR, if there is any"
    )
    group.add_argument(
        "--elastic",
        action="store_true",
        help="when ranks are lost, go on with those that are left (with --checkpoint)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.runtime.launch.parent_process import cool_down, warm_up
    from piper.runtime.launch.signals import default_signals

    default_signals()
    settle_launch(arguments, LAUNCHERS)
    options = launch_options(arguments)
    if arguments.launch != "local":
        try:
            return _run(arguments, options)
        except RankLost:
            raise
        except PiperError:
            mistaken()
            raise
    warm_up()
    try:
        return _run(arguments, options)
    finally:
        cool_down()


def _run(arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    from piper.runtime.launch.torchrun_environment import under_torchrun

    if (arguments.steps is None) == (arguments.epochs is None):
        needs = "piper train needs --steps or --epochs"
        both = "--steps and --epochs"
        raise OptionError(needs if arguments.steps is None else both, legal="one of them")
    for name in ("steps", "epochs", "log_every"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name.replace('_', '-')} {value}", legal="at least 1")
    if arguments.watch_at:
        from piper.view.live.address import address_of

        address_of(arguments.watch_at)  # refused before anything takes time
    saved = arguments.file.endswith(".json")
    if saved:
        module = _data_module(arguments)
    else:
        module = import_file(arguments)
        if arguments.data:
            raise OptionError(f"--data, but {arguments.file} has its own", legal="PLAN.json --data")
    if arguments.elastic:
        check_elastic(module, arguments)
    if arguments.launch != "torchrun" or under_torchrun():
        job = _saved_job(arguments) if saved else _lowered_job(module, arguments)
        if job is None:
            return 0
        return _train(job, module, arguments, options)
    if saved:
        num_ranks = _saved_job(arguments).plan.mesh.size
    else:
        num_ranks = arguments.nproc or _program(module, arguments).graph.mesh.size
    own = _without_nproc(arguments.argv)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", str(num_ranks), "-m", "piper", *own]
    remark(
        arguments, f"starting torchrun with {num_ranks} ranks, each of which does the same again"
    )
    give_back()
    sys.stdout.flush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun would, and say so at length
    if arguments.elastic:
        return start_until_done(command, arguments.checkpoint)
    return os.execv(sys.executable, command)


def _without_nproc(argv: list[str]) -> list[str]:
    """torchrun would take --nproc as its own; ranks learn it from WORLD_SIZE."""
    found = [word for word in argv if not word.startswith("--nproc=")]
    if "--nproc" in found:
        at = found.index("--nproc")
        del found[at : at + 2]
    return found


def _data_module(arguments: argparse.Namespace) -> ModuleType:
    """The file of data for a saved plan. It may also register operators that the plan's bodies call."""
    if arguments.data is None:
        raise FileError(
            f"{arguments.file} is a plan, which has no data",
            legal=f"{arguments.file} --data FILE.py, with data(share) or batch()",
        )
    module = load_file(arguments.data)
    if not any(callable(getattr(module, name, None)) for name in ("data", "batch")):
        raise FileError(
            f"{arguments.data} defines neither data() nor batch()", legal="data(share), or batch()"
        )
    return module


def _saved_job(arguments: argparse.Namespace) -> Job:
    """The job of PLAN.json."""
    import piper

    refuse_with_plan(arguments)
    with stage(arguments, f"reading {arguments.file}", f"read and proved {arguments.file}"):
        job = piper.load_job(arguments.file)
    _check_ranks(arguments, job.plan.history, job.plan.mesh)
    return job


def _lowered_job(module: ModuleType, arguments: argparse.Namespace) -> Job | Elastic | None:
    """The job to train; None in a rank that none has use for."""
    from piper.training.elastic import Elastic

    if arguments.on_nan != "go-on" and arguments.clip is None:
        arguments.clip = math.inf  # the norm says whether gradients are finite
    if not arguments.elastic:
        return lowered(_program(module, arguments), module, arguments)
    jobs, most = elastic_jobs(module, arguments)
    if arguments.launch == "torchrun":
        return _elastic_rank(Elastic(jobs, int(os.environ["WORLD_SIZE"])))
    return Elastic(jobs, most)


def _elastic_rank(elastic: Elastic) -> Job | None:
    """torchrun starts all ranks anew when one is lost, maybe fewer of them: the strategy follows."""
    job = elastic.largest(elastic.ranks)
    os.environ["WORLD_SIZE"] = str(job.plan.mesh.size)
    return job if int(os.environ["RANK"]) < job.plan.mesh.size else None


def _train(
    job: Job | Elastic,
    module: ModuleType,
    arguments: argparse.Namespace,
    options: dict[str, Any],
) -> int:
    import piper
    from piper.training.data import MadeBatches
    from piper.training.elastic import Elastic

    data = getattr(module, "data", None)
    if data is None:
        file = arguments.data or arguments.file
        if arguments.epochs is not None:
            raise OptionError(
                f"--epochs, but {file} has no data(share), which ends", legal="--steps N"
            )
        note(f"{file} has no data(share): each step makes a batch()")
        seed = (arguments.seed or 0) if isinstance(job, Elastic) else job.plan.seed
        data = MadeBatches(module.batch, seed=seed)
    last = _Last(arguments)
    try:
        training = piper.train(
            job,
            data,
            steps=arguments.steps,
            epochs=arguments.epochs,
            launch=arguments.launch,
            lr_schedule=getattr(module, "lr_schedule", None),
            evaluate=getattr(module, "validation", None),
            evaluate_every=arguments.evaluate_every,
            log=own_stdout() if arguments.json else "auto",
            on_nan=arguments.on_nan.replace("-", " "),
            read_again=arguments.read_again,
            skip_unreadable=arguments.skip_unreadable,
            log_every=arguments.log_every,
            callbacks=[last],
            checkpoint=arguments.checkpoint,
            checkpoint_every=arguments.every,
            keep=arguments.keep,
            resume=arguments.resume or arguments.elastic,
            record=arguments.record,
            record_steps=arguments.record_steps,
            watch=arguments.watch_at or arguments.watch,
            watch_every=arguments.watch_every,
            **options,
        )
    except KeyboardInterrupt:
        print(f"interrupted after {last.step}", file=sys.stderr)
        return INTERRUPTED
    if training.stopped:
        return TERMINATED
    return UNSAVED if training.saved is False else 0


class _Last:
    """A callback that keeps what there is to say of the last step, and says when training begins."""

    step = "no step"

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.begun = arguments, time.perf_counter()

    def on_start(self, facts: dict[str, Any]) -> None:
        ranks, seconds = facts["ranks"], time.perf_counter() - self.begun
        who = "1 rank is" if ranks == 1 else f"{ranks} ranks are"
        remark(self.arguments, f"{who} ready after {seconds:.1f} s")

    def on_step(self, record: Record) -> None:
        self.step = f"step {record.step}: loss {record.loss:.4f}"


def _program(module: ModuleType, arguments: argparse.Namespace) -> Any:
    """The traced program; its strategy must have the ranks that are asked for."""
    from piper.strategies import parallel

    wanted = _wanted_ranks(arguments)
    default = parallel(dp=wanted) if wanted and wanted > 1 else None
    program = trace_file(module, arguments, default=default)
    _check_ranks(arguments, program.history, program.graph.mesh)
    return program


def _wanted_ranks(arguments: argparse.Namespace) -> int | None:
    from piper.runtime.launch.torchrun_environment import under_torchrun

    wanted: int | None = arguments.nproc
    if arguments.launch == "torchrun" and under_torchrun():
        wanted = int(os.environ["WORLD_SIZE"])
    if wanted is not None and wanted < 1:
        raise OptionError(f"--nproc {wanted}", legal="at least 1")
    return wanted


def _check_ranks(arguments: argparse.Namespace, history: Sequence[Directed], mesh: Mesh) -> None:
    from piper.ir.history import ranks_text

    wanted = _wanted_ranks(arguments)
    if wanted is None or wanted == mesh.size:
        return
    has = f"the strategy has {ranks_text(history, mesh)}"
    if arguments.nproc is None:
        raise OptionError(
            f"torchrun started {wanted} ranks, but {has}",
            legal=f"--nproc-per-node {mesh.size}, over all nodes, or other degrees",
        )
    raise OptionError(
        f"--nproc {wanted}, but {has}",
        legal=f"--nproc {mesh.size}, or other degrees",
    )
