"""`piper checkpoint`: look into a saved run, hold it to its checksums, or write it in another form."""

from __future__ import annotations

import argparse
import math
import os
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from piper.cli.json_output import put
from piper.ir.form.byte_sizes import show_size

if TYPE_CHECKING:
    from piper.stored.manifest import Manifest

FAILED = 1


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "checkpoint",
        words="show|verify|convert DIR [options]",
        examples=(
            "piper checkpoint show RUN --tensors",
            "piper checkpoint verify RUN",
            "piper checkpoint convert RUN weights.safetensors",
        ),
        help="show, verify or convert a saved run",
        description="DIR is one checkpoint, or a folder of them: then the latest is taken.",
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", prog="piper checkpoint"
    )
    for name, words in (
        ("show", "what it is: step, strategy, tensors, bytes"),
        ("verify", "read all of it, and hold it to its checksums"),
        ("convert", "write its weights into FILE.safetensors, or all of it into FILE.pt"),
    ):
        action = actions.add_parser(name, help=words)
        action.add_argument("folder", metavar="DIR", help="a checkpoint, or a folder of them")
        if name == "convert":
            action.add_argument("out", metavar="FILE", help=".safetensors or .pt")
        if name == "show":
            action.add_argument("--tensors", action="store_true", help="list every tensor")
        action.add_argument("--json", action="store_true", help="machine-readable")
        action.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from piper.stored.folders import found_in

    path, manifest = found_in(arguments.folder)
    if arguments.action == "show":
        return _show(arguments, path, manifest)
    if arguments.action == "verify":
        return _verify(arguments, path, manifest)
    from piper.runtime.state.convert import convert

    num = convert(manifest.state(path), arguments.out)
    facts = {"checkpoint": path, "file": arguments.out, "tensors": num}
    if arguments.json:
        put(facts)
    else:
        print(f"{arguments.out}: {num} tensors of {path}")
    return 0


def _show(arguments: argparse.Namespace, path: str, manifest: Manifest) -> int:
    from piper.stored.folders import checkpoints

    sections: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, tensor in manifest.tensors.items():
        counts = sections[manifest.paths[name][0]]
        counts[0] += 1
        counts[1] += math.prod(tensor.shape)
        counts[2] += sum(piece.length for piece in tensor.pieces)
    facts = {
        "checkpoint": path,
        "steps": manifest.steps,
        "piper": manifest.piper,
        "format": manifest.format,
        "seed": manifest.seed,
        "mesh": manifest.mesh,
        "plan": manifest.plan,
        "strategy": manifest.history,
        "optimizers": sorted({group.optimizer for group in manifest.param_groups}),
        "sections": {
            name: dict(zip(("tensors", "elements", "bytes"), counts, strict=True))
            for name, counts in sections.items()
        },
        "others": [str(other) for other in checkpoints(os.path.dirname(path))],
    }
    if arguments.json:
        put(facts)
        return 0
    print(
        f"{path}: after step {manifest.steps}, by Piper {manifest.piper} (format {manifest.format})"
    )
    print(f"saved on {manifest.mesh}, plan {manifest.plan}, seed {manifest.seed}")
    for line in manifest.history:
        print(f"    {line}")
    for name, (num, elements, size) in sections.items():
        print(f"{name}: {num} tensors, {elements:,} elements, {show_size(size)}")
    if arguments.tensors:
        for name, tensor in manifest.tensors.items():
            print(f"    {name} {tensor.dtype}{list(tensor.shape)}, {len(tensor.pieces)} pieces")
    return 0


def _verify(arguments: argparse.Namespace, path: str, manifest: Manifest) -> int:
    from piper.runtime.state.audit import audit

    problems = audit(manifest.state(path))
    if arguments.json:
        put({"checkpoint": path, "whole": not problems, "problems": problems})
    else:
        for problem in problems:
            print(problem)
        num = len(manifest.tensors)
        verdict = f"{len(problems)} damaged" if problems else "all as they were written"
        print(f"{path}: {num} tensors, {verdict}")
    return FAILED if problems else 0
