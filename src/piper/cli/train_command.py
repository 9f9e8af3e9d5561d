"""`piper train`: train a FILE under a strategy, on local processes, under torchrun or on Ray."""

from __future__ import annotations

import argparse
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from piper.cli.user_file import add_program_arguments, load_file, trace_file
from piper.errors import FileError
from piper.plan.optimizers import KNOWN

if TYPE_CHECKING:
    from piper.plan.types import Optimizer
    from piper.training.records import Record

INTERRUPTED = 130
OPTIMIZERS = {name.lower(): name for name in KNOWN}
LAUNCHERS = {  # which options of the command line each launcher takes
    "local": ("timeout", "ranks_per_gpu", "compile"),
    "torchrun": ("timeout", "compile"),
    "ray": ("timeout", "compile", "near", "spread", "address"),
    "loopback": (),
    "single": ("compile",),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("train", help="train a model under a strategy")
    add_program_arguments(parser)
    parser.add_argument("--steps", type=int, required=True, metavar="N")
    group = parser.add_argument_group("where")
    group.add_argument(
        "--launch",
        choices=tuple(LAUNCHERS),
        default="local",
        help="a process per rank here (default), torchrun, Ray, or all ranks in this process",
    )
    group.add_argument(
        "--nproc", type=int, metavar="N", help="ranks; without a strategy, N data ranks"
    )
    group.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    group.add_argument(
        "--ranks-per-gpu", type=int, metavar="K", help="ranks that share each GPU, by MPS"
    )
    group.add_argument("--compile", action="store_true", default=None, help="Inductor bodies")
    group.add_argument(
        "--timeout", type=float, metavar="S", help="seconds without progress that end the run"
    )
    group.add_argument(
        "--address",
        help="Ray: HOST:PORT of a cluster, or local (default: one that runs, else a new one here)",
    )
    group.add_argument("--near", metavar="AXIS", help="Ray: ranks along it on one machine")
    group.add_argument("--spread", metavar="AXIS", help="Ray: ranks along it on many machines")
    group = parser.add_argument_group("training")
    group.add_argument("--precision", choices=("bf16", "fp32"), help="default: as written")
    group.add_argument("--clip", type=float, metavar="X", help="largest norm of all gradients")
    group.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        metavar="NAME",
        help="one of torch.optim (default: the file's optimizer(params), else adamw)",
    )
    group.add_argument("--lr", type=float, metavar="X", help="learning rate")
    group.add_argument("--seed", type=int, default=0, help="of weights, dropout, order of data")
    group.add_argument(
        "--evaluate-every", type=int, default=0, metavar="N", help="steps, on validation(share)"
    )
    group.add_argument(
        "--stop-on-nan", action="store_true", help="end at a loss or norm that is not finite"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.runtime.launch.signals import default_signals
    from piper.runtime.launch.torchrun import under_torchrun

    default_signals()
    module = load_file(arguments.file, "model", "batch", "step")
    options = launch_options(arguments)
    if arguments.launch != "torchrun" or under_torchrun():
        return _train(module, arguments, options)
    num_ranks = arguments.nproc or _program(module, arguments).graph.mesh.size
    own = _without_nproc(arguments.argv)
    command = ["--standalone", "--nproc-per-node", str(num_ranks), "-m", "piper", *own]
    sys.stdout.flush()
    return os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])


def _without_nproc(argv: list[str]) -> list[str]:
    """torchrun would take --nproc as its own; ranks learn it from WORLD_SIZE."""
    found = [word for word in argv if not word.startswith("--nproc=")]
    if "--nproc" in found:
        at = found.index("--nproc")
        del found[at : at + 2]
    return found


def _train(module: ModuleType, arguments: argparse.Namespace, options: dict[str, Any]) -> int:
    import piper
    from piper.training.data import made_batches

    program = _program(module, arguments)
    job = program.lower(
        optimizer=optimizer_of(module, arguments, program),
        device=arguments.device,
        seed=arguments.seed,
        clip=arguments.clip,
        precision=arguments.precision,
    )
    data = getattr(module, "data", None)
    if data is None:
        _note(arguments, f"{arguments.file} has no data(share): each step makes a batch()")
        data = made_batches(module.batch, seed=arguments.seed)
    last: list[Record] = []
    try:
        piper.train(
            job,
            data,
            steps=arguments.steps,
            launch=arguments.launch,
            lr_schedule=getattr(module, "lr_schedule", None),
            evaluate=getattr(module, "validation", None),
            evaluate_every=arguments.evaluate_every,
            log="json" if arguments.json else "auto",
            stop_on_nan=arguments.stop_on_nan,
            on_step=lambda record: last.__setitem__(slice(None), [record]),
            **options,
        )
    except KeyboardInterrupt:
        done = f"step {last[0].step}: loss {last[0].loss:.4f}" if last else "no step"
        print(f"interrupted after {done}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _program(module: ModuleType, arguments: argparse.Namespace) -> Any:
    """The traced program; its strategy must have the ranks that are asked for."""
    from piper.runtime.launch.torchrun import under_torchrun
    from piper.strategies import parallel

    wanted = arguments.nproc
    if arguments.launch == "torchrun" and under_torchrun():
        wanted = int(os.environ["WORLD_SIZE"])
    if wanted is not None and wanted < 1:
        raise FileError(f"--nproc {wanted}", legal="at least 1")
    default = parallel(dp=wanted) if wanted and wanted > 1 else None
    program = trace_file(module, arguments, default=default)
    size = program.graph.mesh.size
    if wanted is not None and wanted != size:
        raise FileError(
            f"--nproc {wanted}, but the strategy has {size} ranks ({program.graph.mesh})",
            legal=f"--nproc {size}, or other degrees",
        )
    return program


def launch_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the launcher is given; an option that it does not take is refused."""
    every = {name for taken in LAUNCHERS.values() for name in taken}
    given = {name: getattr(arguments, name) for name in sorted(every)}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in LAUNCHERS[arguments.launch]:
            legal = [launcher for launcher, taken in LAUNCHERS.items() if name in taken]
            raise FileError(
                f"--{name.replace('_', '-')} does not go with --launch {arguments.launch}",
                legal=f"--launch {' or '.join(legal)}",
            )
    return given


def optimizer_of(module: ModuleType, arguments: argparse.Namespace, program: Any) -> Optimizer:
    """That of the command line, else of the file, else AdamW; --lr is for any of them."""
    from piper.plan.types import Optimizer

    own = getattr(module, "optimizer", None)
    if arguments.optimizer or own is None:
        found = Optimizer(OPTIMIZERS[arguments.optimizer or "adamw"])
    else:
        found = program.source.optimizer(own)
    if arguments.lr is None:
        return found
    return Optimizer(found.name, {**found.options, "lr": arguments.lr})


def _note(arguments: argparse.Namespace, text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {text}", file=sys.stderr)
