"""Elastic jobs: the user's FILE and command line in, a job for each number of ranks out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import gcd
from types import ModuleType
from typing import TYPE_CHECKING, Any

from piper.cli.lowering_options import lowered
from piper.cli.machine_options import given_machine
from piper.cli.user_file import DEGREES, chosen_strategy, schedule_function, trace_file
from piper.errors import FileError, OptionError, PiperError

if TYPE_CHECKING:
    from piper.api.job import Job


def check_elastic(module: ModuleType, arguments: argparse.Namespace) -> None:
    """Raise unless the strategies for other numbers of ranks are known, and the largest number."""
    if arguments.file.endswith(".json"):
        raise OptionError(
            "--elastic does not go with a saved plan, which is for one number of ranks",
            legal="piper train FILE.py --elastic",
        )
    if arguments.checkpoint is None:
        raise OptionError(
            "--elastic without --checkpoint", legal="--elastic --checkpoint DIR --every N"
        )
    own = getattr(module, "elastic", None)
    if own is not None and not (arguments.nproc or arguments.pp or arguments.dp):
        from piper.runtime.launch.torchrun_environment import under_torchrun

        if arguments.launch != "torchrun" or not under_torchrun():
            raise FileError(
                f"for how many ranks is elastic(ranks) of {arguments.file}?", legal="--nproc N"
            )
    if own is None and (arguments.strategy or chosen_strategy(arguments, module) is None):
        raise OptionError(
            "--elastic needs to know the strategies for other numbers of ranks",
            legal=f"def elastic(ranks): ... in {arguments.file}, or --pp, --dp and other degrees",
        )


def elastic_jobs(
    module: ModuleType, arguments: argparse.Namespace
) -> tuple[Callable[[int], Job | None], int]:
    """The job for at most so many ranks, or None; and how many ranks there are if none is lost.

    By the file's `elastic(ranks)`, which gives a strategy or None; else the options' strategy with
    fewer data ranks and as many global microbatches. What is wrong with the strategy that is asked
    for is an error, with one of fewer ranks not.
    """
    own = getattr(module, "elastic", None)
    plain = argparse.Namespace(**{**vars(arguments), **dict.fromkeys(DEGREES), "strategy": None})
    program = trace_file(module, plain, own=False)

    def job(ranks: int) -> Job | None:
        for number, strategy in enumerate(_strategies(own, arguments, ranks)):
            try:
                found = lowered(program.apply(strategy), module, arguments)
            except PiperError:
                if own is not None or (number == 0 and ranks >= asked):
                    raise  # it is the user's
                continue
            return found
        return None

    asked = (arguments.pp or 1) * (arguments.dp or 1) * (arguments.tp or 1)
    asked *= arguments.cp or 1
    return job, arguments.nproc or asked


def _strategies(own: Any, arguments: argparse.Namespace, ranks: int) -> list[Callable[..., None]]:
    """Those to try, the one with most ranks first."""
    from piper.strategies import parallel

    if own is not None:
        found = own(ranks)
        return [] if found is None else [found]
    degrees = {name: getattr(arguments, name) for name in DEGREES if getattr(arguments, name)}
    if "schedule" in degrees:
        degrees["schedule"] = schedule_function(degrees["schedule"])
    pp, dp, ep = (degrees.pop(name, 1) for name in ("pp", "dp", "ep"))
    total = dp * degrees.pop("microbatches", 1)
    degrees |= {"machine": given_machine(arguments), "precision": arguments.precision}
    beside = degrees.get("tp", 1) if degrees.get("etp") == 1 and ep > 1 else 1
    return [
        parallel(
            pp=pp,
            dp=fewer,
            ep=beside * gcd(ep // beside, fewer),
            microbatches=total // fewer,
            **degrees,
        )
        for fewer in range(
            min(dp, ranks // (pp * degrees.get("tp", 1) * degrees.get("cp", 1))), 0, -1
        )
        if total % fewer == 0
    ]
