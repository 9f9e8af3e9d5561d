"""What plan, verify and train have in common: the user's FILE, its strategy, the traced program."""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from piper.cli.machine_options import given_machine
from piper.cli.stage_lines import ending_at_once, note, remark, stage
from piper.errors import FileError, OptionError, Source, did_you_mean, is_users
from piper.files import module_of, near_file
from piper.ir.attention_forms import ATTENTION
from piper.mesh import Mesh

DEGREES = (
    "pp",
    "dp",
    "ep",
    "tp",
    "sp",
    "etp",
    "strips",
    "cp",
    "cp_attention",
    "schedule",
    "microbatches",
    "zero",
    "bucket_size",
    "reduce_every",
    "reuse",
    "recompute",
    "costs",
)
STRATEGY_OPTIONS = ("strategy", "mean", *DEGREES)


def add_program_arguments(parser: argparse.ArgumentParser, *, more: str = "") -> None:
    parser.add_argument(
        "file",
        metavar="FILE.py",
        help="a Python file with model(), batch(), step(model, batch), maybe strategy(s)"
        + more
        + "; or JOB.toml: a file of these options",
    )
    add_strategy_arguments(parser)


def add_strategy_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "strategy", "default: the file's strategy(s), else one device"
    )
    group.add_argument(
        "--strategy",
        metavar="FILE",
        help="a Python file with strategy(s), or a .json file of the published form",
    )
    group.add_argument("--pp", type=int, metavar="N", help="pipeline ranks (default: 1)")
    group.add_argument("--dp", type=int, metavar="N", help="data ranks, all of them (default: 1)")
    group.add_argument(
        "--ep", type=int, metavar="N", help="ranks that share experts; divides --dp (default: 1)"
    )
    group.add_argument("--tp", type=int, metavar="N", help="ranks that share tensors (default: 1)")
    group.add_argument(
        "--sp",
        action="store_true",
        default=None,
        help="with --tp: cut sequences, too, where tensors are not (sequence parallelism)",
    )
    group.add_argument(
        "--etp",
        type=int,
        metavar="N",
        help="ranks that share each expert's matrices: those of --tp, or 1. Then experts stay whole, "
        "needs --sp, and --ep counts the ranks of --tp as well (default: --tp)",
    )
    group.add_argument(
        "--strips",
        type=int,
        metavar="N",
        help="with --tp: tokens go through matrix products in so many strips, of which one is "
        "communicated beside another (default: 1)",
    )
    group.add_argument(
        "--cp", type=int, metavar="N", help="ranks that share sequences (default: 1)"
    )
    group.add_argument(
        "--cp-attention",
        choices=ATTENTION,
        help="with --cp: keys and values of all ranks to each (gather, the default), whole sequences "
        "of some heads to each (heads, Ulysses), or keys and values from rank to rank (ring)",
    )
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="see `piper schedule --list`; or FILE.csv, FILE.json, FILE.py:FUNCTION (default: 1f1b)",
    )
    group.add_argument(
        "--microbatches", type=int, metavar="M", help="microbatches per data rank (default: 1)"
    )
    group.add_argument(
        "--zero",
        type=int,
        metavar="N",
        help="what is cut over data ranks: 0 nothing, 1 optimizer state, 2 also gradients, 3 also "
        "parameters (default: 0)",
    )
    group.add_argument(
        "--bucket-size",
        metavar="SIZE",
        help="parameters reduced or gathered at once: 25MiB (default: by the model's size)",
    )
    group.add_argument(
        "--reduce-every",
        type=_cadence,
        metavar="N",
        help="microbatches between reductions of gradients (--zero 2 and 3), or step: once (default: by "
        "memory)",
    )
    group.add_argument(
        "--reuse",
        type=_cadence,
        metavar="N",
        help="uses that one gather of parameters serves (--zero 3), or step: all (default: by memory)",
    )
    group.add_argument(
        "--recompute",
        choices=("nothing", "pieces", "expensive", "everything"),
        help="what to keep for backwards; all else is computed again (default: everything)",
    )
    group.add_argument(
        "--costs",
        choices=("measure",),
        help="cut a model without tags by what its modules take on this machine (default: by "
        "estimates)",
    )
    group.add_argument(
        "--mean",
        choices=("microbatch", "batch"),
        help="what a mean loss is over: each microbatch (default), or all targets of the batch that "
        "are not ignore_index",
    )
    add_output_arguments(parser)


def add_output_arguments(parser: argparse.ArgumentParser) -> Any:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON, errors as well")
    group.add_argument("--debug", action="store_true", help="show tracebacks")
    return group


def _cadence(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def import_file(arguments: argparse.Namespace) -> ModuleType:
    """The user's FILE, as a module with all that a program needs."""
    file = arguments.file
    with stage(arguments, f"importing torch and {file}", f"imported torch and {file}"):
        with ending_at_once():
            import piper.bodies.leaves  # noqa: F401  (and so torch)
        return load_file(file, "model", "batch", "step")


def load_file(path: str, *needed: str) -> ModuleType:
    """Import a file by path and check that it defines the functions that are needed."""
    if not os.path.exists(path):
        near = near_file(path, ".py" if os.path.splitext(path)[1] in ("", ".py") else "")
        raise FileError(f"there is no file {path}{near}", legal="the path of a Python file")
    if not os.path.isfile(path):
        raise FileError(f"{path} is no regular file")
    if not path.endswith(".py"):
        raise FileError(f"{path} is not a Python file", legal="a file that ends in .py")
    try:
        module = module_of(path)
    except SystemExit as error:
        raise FileError(
            f"{path} ends its own import{_place(error)}",
            legal='definitions at the top, and what runs them under if __name__ == "__main__":',
        ) from error
    missing = [function for function in needed if not callable(getattr(module, function, None))]
    if missing:
        raise FileError(
            f"{path} does not define {', '.join(f'{name}()' for name in missing)}",
            details=[f"def {name}(): return {found}" for name, found in _near(module, missing)],
            legal="model(), batch(), step(model, batch) and optionally strategy(s)",
        )
    return module


def _place(error: BaseException) -> str:
    """` (model.py:3)`: the innermost line of the user's."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if is_users(frame.filename):
            return f" ({Source(os.path.abspath(frame.filename), frame.lineno or 0)})"
    return ""


def _near(module: ModuleType, missing: list[str]) -> Iterator[tuple[str, str]]:
    """What the file has instead of functions that it should define: a class Model, a tensor batch."""
    for name in missing:
        for own, value in vars(module).items():
            if own.lower() == name and name != "step":
                yield name, f"{own}()" if callable(value) else own


def schedule_function(name: str) -> Any:
    """The function of FILE.py:FUNCTION; any other name as it is."""
    file, _, function = name.rpartition(":")
    if name.endswith(".py"):
        raise FileError(f"which function of {name}?", legal=f"{name}:FUNCTION")
    if not file.endswith(".py"):
        return name
    module = load_file(file)
    if not callable(getattr(module, function, None)):
        own = [
            n for n, f in vars(module).items() if getattr(f, "__module__", "") == module.__name__
        ]
        raise FileError(
            f"{file} has no function {function!r}{did_you_mean(function, own)}",
            legal=", ".join(f"{file}:{name}" for name in own)
            or "def mine(*, num_ranks, num_microbatches):",
        )
    return getattr(module, function)


def strategy_file(path: str) -> Callable[..., None]:
    """The strategy of a .json file."""
    from piper.strategies import from_json

    return from_json(Path(path))


def chosen_strategy(
    arguments: argparse.Namespace, module: ModuleType
) -> Callable[..., None] | None:
    from piper.strategies import parallel

    degrees = {name: getattr(arguments, name) for name in DEGREES if getattr(arguments, name)}
    for name in ("pp", "dp", "ep", "tp", "cp", "microbatches"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            raise OptionError(f"--{name} {getattr(arguments, name)}", legal="at least 1")
    if arguments.strategy:
        if degrees:
            raise OptionError(
                "--strategy and degrees of parallelism exclude each other",
                legal="--strategy FILE, or --pp --dp --ep --zero --schedule --microbatches ...",
            )
        if arguments.strategy.endswith(".json"):
            return strategy_file(arguments.strategy)
        return load_file(arguments.strategy, "strategy").strategy
    if degrees:
        if hasattr(module, "strategy"):
            note(f"these options replace strategy(s) of {arguments.file}")
        if "schedule" in degrees:
            degrees["schedule"] = schedule_function(degrees["schedule"])
        precision = getattr(arguments, "precision", None)
        return parallel(**degrees, machine=given_machine(arguments), precision=precision)
    own = getattr(module, "strategy", None)
    if own is not None and not callable(own):
        raise FileError(
            f"strategy in {arguments.file} is no function", legal="def strategy(s): ..."
        )
    return own


def trace_file(
    module: ModuleType,
    arguments: argparse.Namespace,
    *,
    double: bool = False,
    default: Callable[..., None] | None = None,
    own: bool = True,
) -> Any:
    """The program of a FILE under the strategy of the command line, else (with `own`) of the file, else
    `default`."""
    import piper
    from piper.training.precision import doubled, doubled_model

    make_model = doubled_model(module.model) if double else module.model
    with stage(arguments, f"tracing {arguments.file}", f"traced {arguments.file}"):
        batch = doubled(module.batch()) if double else module.batch()
        program = piper.trace(make_model, batch, module.step, mean=arguments.mean or "microbatch")
    strategy = (chosen_strategy(arguments, module) if own else None) or default
    if strategy:
        with stage(arguments, "applying the strategy", "applied the strategy"):
            program = program.apply(strategy)
    if own:
        remark(arguments, strategy_text(arguments, program.graph.mesh))
    return program


def strategy_text(arguments: argparse.Namespace, mesh: Mesh) -> str:
    """The strategy as the command line says it, and the mesh that it makes."""
    ranks = "1 rank" if mesh.size == 1 else f"{mesh.size} ranks"
    made = f"{ranks}, mesh {mesh}" if mesh.axes else "one device"
    words = []
    for name in DEGREES:
        value = getattr(arguments, name)
        if value:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    if arguments.strategy:
        words = ["--strategy", arguments.strategy]
    if not words:
        return f"strategy: {made}"
    counted = ""
    if arguments.ep and arguments.ep > 1:
        sizes = dict(mesh.axes)
        dp, ep = sizes.get("dp", 1), sizes.get("ep", 1)
        counted = f"the {arguments.dp} data ranks are dp={dp} x ep={ep}"
        if ep != arguments.ep:
            counted += f", experts are on ep={ep} x tp={arguments.tp}"
        counted = f" ({counted})"
    return f"strategy {' '.join(words)}: {made}{counted}"
