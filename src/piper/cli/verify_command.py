"""`piper verify`: train a FILE under a strategy and on one device, in float64, and compare."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from piper.cli.json_output import put
from piper.cli.lowering_options import add_weights_argument
from piper.cli.machine_options import add_machine_arguments, given_machine
from piper.cli.user_file import add_program_arguments, import_file, trace_file
from piper.errors import OptionError

if TYPE_CHECKING:
    from piper.frontend.islands import Island
    from piper.training.verdict import Measured, Verdict
    from piper.training.verify import Errors, Rounded

FAILED = 1
_NAMED = 4  # tensors and places that are printed; JSON has all


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "verify",
        words="FILE.py|JOB.toml [options]",
        help="compare a strategy with one device, in float64",
        description="Train the model under the strategy and on one device, in float64, and compare "
        "losses, gradients and parameters. The exit code is 1 if they differ.",
        examples=(
            "piper verify FILE.py --pp 2 --dp 2 --zero 3 --microbatches 4",
            "piper verify FILE.py --dp 2 --launch local               # on processes",
        ),
    )
    add_program_arguments(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument(
        "--steps", type=int, default=3, metavar="N", help="of the file's optimizer, else AdamW"
    )
    group.add_argument(
        "--launch",
        choices=("loopback", "local"),
        default="loopback",
        help="all ranks in this process (default), or one process per rank",
    )
    group.add_argument(
        "--adversary", action="store_true", help="loopback: delay streams, poison freed memory"
    )
    add_weights_argument(group)
    add_machine_arguments(parser.add_argument_group("machine"))
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.training.precision import doubled
    from piper.training.verdict import ADAMW, verify

    if arguments.steps < 1:
        raise OptionError(f"--steps {arguments.steps}", legal="at least 1")
    if arguments.adversary and arguments.launch != "loopback":
        raise OptionError("--adversary goes with --launch loopback")
    module = import_file(arguments)
    program = trace_file(module, arguments, double=True)
    batches = [doubled(module.batch()) for _ in range(arguments.steps)]
    options: dict[str, Any] = {"adversary": True} if arguments.adversary else {}
    optimizer = getattr(module, "optimizer", None) or ADAMW
    options |= {"weights": arguments.weights, "launch": arguments.launch}
    options["machine"] = given_machine(arguments)
    verdict = verify(program, batches, optimizer, **options)
    if arguments.json:
        put(_facts(verdict))
    else:
        plan = verdict.proof.oracle.job.plan
        names = dict.fromkeys(group.optimizer for group in plan.param_groups)
        print(
            f"{plan.mesh.size} ranks ({arguments.launch}) against one device on the same "
            f"{plan.num_data_ranks * plan.num_microbatches} microbatches, "
            f"{arguments.steps} {' and '.join(names)} steps"
        )
        for line in _lines(verdict):
            print(f"  {line}")
        print(_word(verdict))
    return 0 if verdict.exact else FAILED


def _facts(verdict: Verdict) -> dict[str, Any]:
    def facts(measured: Measured) -> dict[str, Any]:
        errors = measured.errors
        return {
            **{name: error for name, error, _ in _rows(errors)},
            "bounds": asdict(errors.bounds),
            "rounded": [asdict(rounded) for rounded in errors.rounded],
            "differing_replicas": errors.differing_replicas,
            "dtype": measured.oracle.dtype,
        }

    return {
        **facts(verdict.proof),
        "as_written": facts(verdict.as_written) if verdict.as_written else None,
        "islands": [
            {**asdict(island), "source": str(island.source or "")} for island in verdict.islands
        ],
        "refusal": verdict.refusal,
        "exact": verdict.exact,
    }


def _lines(verdict: Verdict) -> Iterator[str]:
    """What is proved, what is only rounding, and what is only bounded."""
    errors = verdict.proof.errors
    yield from _error_lines(errors)
    vanishing = [r for r in errors.rounded if r.explained is None]
    amplified = [r for r in errors.rounded if r.explained is not None]
    if vanishing:
        yield f"rounding   no gradient beyond it in {_few(_tensors(vanishing))}"
    if amplified:
        largest = max(amplified, key=lambda r: r.error)
        yield (
            f"rounding   largest error {largest.error:.2e}  bound {largest.explained:.0e}  "
            f"only bounded: {_few(_tensors(amplified))}"
        )
    yield f"replicas   {_replicas(errors)}"
    if verdict.islands:
        yield from _island_lines(verdict)


def _error_lines(errors: Errors) -> Iterator[str]:
    for name, error, bound in _rows(errors):
        mark = "ok" if error <= bound else "ABOVE THE BOUND"
        where = errors.worst.get(name, "")
        yield f"{name:<10} largest error {error:.2e}  bound {bound:.0e}  {mark}  {where}".rstrip()


def _island_lines(verdict: Verdict) -> Iterator[str]:
    """Where the model leaves float64, and how it does as it is written."""
    dtypes = ", ".join(dict.fromkeys(island.dtype for island in verdict.islands))
    written = verdict.as_written
    how = f"lifted to {verdict.proof.oracle.dtype} above" if written else verdict.refusal
    yield f"{dtypes:<10} {how}: {_few([_place(island) for island in verdict.islands])}"
    if written is not None and written.errors.exact:
        rows = ", ".join(f"{name} {error:.1e}" for name, error, _ in _rows(written.errors))
        yield f"as written {rows}  bound {written.errors.bounds.gradient:.0e}  ok"
    elif written is not None:
        yield f"as written, in {dtypes}"
        yield from _error_lines(written.errors)
        yield f"replicas   {_replicas(written.errors)}"


def _tensors(found: Sequence[Rounded]) -> list[str]:
    """Names without their step, each once; with the number of elements if not all are meant."""
    names = {r.name.split(" in ")[0]: r for r in found}
    return [
        f"{name} ({r.vanishing} of {r.elements})" if 0 < r.vanishing < r.elements else name
        for name, r in names.items()
    ]


def _place(island: Island) -> str:
    file = str(island.source or "").rpartition("site-packages/")[2]
    times = f" and {island.count - 1} more" if island.count > 1 else ""
    return f"{file} {island.operator} in {island.module or 'step'}{times}"


def _few(names: Sequence[str]) -> str:
    """How many, and the first of them, a line each where there are several."""
    more = [f"and {len(names) - _NAMED} more (--json)"] if len(names) > _NAMED else []
    return ("\n" + " " * 13).join([str(len(names)), *names[:_NAMED], *more])


def _rows(errors: Errors) -> list[tuple[str, float, float]]:
    names = ("loss", "gradient", "parameter")
    return [(name, getattr(errors, name), getattr(errors.bounds, name)) for name in names]


def _replicas(errors: Errors) -> str:
    differing = ", ".join(errors.differing_replicas)
    return f"DIFFER: {differing}" if differing else "bit-equal"


def _word(verdict: Verdict) -> str:
    if not verdict.exact:
        return "NOT exact"
    dtype = verdict.proof.oracle.dtype
    return "exact" if dtype == "float64" else f"equal as far as {dtype} shows"
