"""What plan and train have in common: options of lowering in, a Job out."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from piper.cli.device_option import add_device_argument, spoken_device
from piper.cli.machine_options import MACHINE_OPTIONS, given_machine
from piper.cli.stage_lines import stage
from piper.cli.user_file import STRATEGY_OPTIONS
from piper.errors import OptionError
from piper.ir.precisions import PRECISIONS
from piper.plan.optimizers import KNOWN

if TYPE_CHECKING:
    from piper.api.job import Job
    from piper.plan.optimizers import Optimizer
    from piper.runtime.factory import Factory

OPTIMIZERS = {name.lower(): name for name in KNOWN}
LOWERING_OPTIONS = (
    "device", "precision", "clip", "memory_limit", "optimizer", "lr", "seed", "weights", *MACHINE_OPTIONS
)  # fmt: skip


def add_lowering_arguments(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("training")
    add_device_argument(group)
    group.add_argument("--precision", choices=tuple(PRECISIONS), help="default: as written")
    group.add_argument(
        "--clip", type=float, metavar="X", help="largest norm of all gradients (default: any)"
    )
    group.add_argument(
        "--memory-limit",
        metavar="SIZE",
        help="the most that a rank may need, such as 80GiB; what the strategy leaves open is chosen to "
        "fit, and what does not fit is refused (default: any)",
    )
    group.add_argument(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        metavar="NAME",
        help="one of torch.optim (default: the file's optimizer, else adamw)",
    )
    group.add_argument(
        "--lr", type=float, metavar="X", help="learning rate (default: the optimizer's)"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", help="of weights, dropout, order of data (default: 0)"
    )
    add_weights_argument(group)
    return group


def refuse_with_plan(arguments: argparse.Namespace, *, but: Collection[str] = ()) -> None:
    """What a saved plan says already cannot be said again, `but` for what the command itself uses."""
    for name in (*STRATEGY_OPTIONS, *LOWERING_OPTIONS):
        if name not in but and getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(
                f"{option} does not go with a saved plan", legal=f"piper plan FILE.py {option} -o"
            )


def add_weights_argument(parser: Any) -> None:
    parser.add_argument(
        "--weights",
        metavar="PATH",
        help="start from these: .safetensors, a file of torch.save, or a folder "
        "(Hugging Face's, or a distributed checkpoint)",
    )


def lowered(program: Any, module: ModuleType, arguments: argparse.Namespace) -> Job:
    """The job of a program under these options."""
    device = spoken_device(arguments)
    with stage(arguments, "lowering", "lowered to a plan, and proved,"):
        job: Job = program.lower(
            optimizer=optimizer_of(module, arguments),
            device=device,
            seed=arguments.seed or 0,
            clip=arguments.clip,
            memory_limit=arguments.memory_limit,
            precision=arguments.precision,
            machine=given_machine(arguments),
            weights=arguments.weights,
        )
    return job


def optimizer_of(module: ModuleType, arguments: argparse.Namespace) -> Optimizer | Factory:
    """That of the command line, else of the file, else AdamW; --lr is for any of them."""
    from piper.plan.optimizers import Optimizer
    from piper.runtime.factory import at_rate

    own = getattr(module, "optimizer", None)
    if arguments.optimizer or own is None:
        own = Optimizer(OPTIMIZERS[arguments.optimizer or "adamw"])
    return own if arguments.lr is None else at_rate(own, arguments.lr)
