"""`piper verify`: train a FILE under a strategy and on one device, in float64, and compare."""

from __future__ import annotations

import argparse
import json
from typing import Any

from piper.cli.user_file import add_program_arguments, load_file, trace_file
from piper.errors import FileError

FAILED = 1


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("verify", help="compare a strategy with one device, in float64")
    add_program_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=3, help="steps of the file's optimizer, else AdamW (default 3)"
    )
    parser.add_argument(
        "--launch",
        choices=("loopback", "local"),
        default="loopback",
        help="all ranks in this process (default), or one process per rank",
    )
    parser.add_argument(
        "--adversary", action="store_true", help="loopback: delay streams, poison freed memory"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import piper
    from piper.training.precision import doubled
    from piper.training.verify import (
        GRADIENT_BOUND,
        LOSS_BOUND,
        PARAMETER_BOUND,
        compare,
        train_one_device,
    )

    if arguments.steps < 1:
        raise FileError(f"--steps {arguments.steps}", legal="at least 1")
    if arguments.adversary and arguments.launch != "loopback":
        raise FileError("--adversary goes with --launch loopback")
    module = load_file(arguments.file, "model", "batch", "step")
    program = trace_file(module, arguments, double=True)
    job = program.lower(optimizer=getattr(module, "optimizer", None) or piper.adamw(lr=1e-3))
    batches = [doubled(module.batch()) for _ in range(arguments.steps)]
    reference = train_one_device(job, batches)
    options = {"adversary": True} if arguments.adversary else {}
    with job.launch(arguments.launch, **options) as run:
        errors = compare(run, batches, reference)
    rows = [
        ("loss", errors.loss, LOSS_BOUND),
        ("gradient", errors.gradient, GRADIENT_BOUND),
        ("parameter", errors.parameter, PARAMETER_BOUND),
    ]
    if arguments.json:
        facts: dict[str, Any] = {name: error for name, error, _ in rows}
        facts["differing_replicas"] = errors.differing_replicas
        facts["exact"] = errors.exact
        print(json.dumps(facts))
        return 0 if errors.exact else FAILED
    ranks = job.plan.mesh.size
    names = dict.fromkeys(group.optimizer for group in job.plan.param_groups)
    pieces = job.plan.num_data_ranks * job.plan.num_microbatches
    print(
        f"{ranks} ranks ({arguments.launch}) against one device on the same {pieces} microbatches, "
        f"{arguments.steps} {' and '.join(names)} steps"
    )
    for name, error, bound in rows:
        where = errors.worst.get(name, "")
        mark = "ok" if error <= bound else "ABOVE THE BOUND"
        print(f"  {name:<10} largest error {error:.2e}  bound {bound:.0e}  {mark}  {where}")
    print(f"  replicas   {'bit-equal' if not errors.differing_replicas else 'DIFFER: '}", end="")
    print(", ".join(errors.differing_replicas))
    print("exact" if errors.exact else "NOT exact")
    return 0 if errors.exact else FAILED
