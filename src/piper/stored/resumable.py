"""Resumable: a manifest and a plan in; FileError unless a run of the plan can go on from there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import msgspec

from piper.errors import FileError
from piper.plan.optimizers import state_pieces
from piper.plan.types import ParamGroup, Plan
from piper.stored.manifest import Manifest

LISTED = 8


def check_resumable(manifest: Manifest, plan: Plan, folder: str) -> None:
    """The same model, optimizers and seed; strategy, world size and precision may be others."""
    problems = [*_tensors(manifest, plan)]
    if manifest.steps:
        problems += [*_optimizers(manifest, plan)]
    if manifest.seed != plan.seed:
        problems.append(f"its seed is {manifest.seed}, this job's {plan.seed}")
    if plan.ema is not None and manifest.ema is None and manifest.steps:
        problems.append("it has no moving averages, which this job keeps")
    if problems:
        more = len(problems) - LISTED
        raise FileError(
            f"{folder} is not of this job",
            details=[*problems[:LISTED], *([f"and {more} more"] if more > 0 else [])],
            legal="the same model, optimizer and seed as when it was saved",
        )


def _tensors(manifest: Manifest, plan: Plan) -> Iterable[str]:
    stored = {
        path[1]: manifest.tensors[name].shape
        for name, path in manifest.paths.items()
        if path[0] == "model"
    }
    wanted = {unquote(name): tensor.shape for name, tensor in plan.tensors.items()}
    for name in sorted(wanted.keys() | stored.keys()):
        if name not in stored:
            yield f"{name} is missing in it"
        elif name not in wanted:
            yield f"{name} is in it, and not in the model"
        elif wanted[name] != stored[name]:
            yield f"{name} is {list(stored[name])} in it, {list(wanted[name])} in the model"


def _optimizers(manifest: Manifest, plan: Plan) -> Iterable[str]:
    mine = {
        unquote(name): (plan.param_groups[bucket.group_of(place)], plan.tensors[name].shape)
        for bucket in plan.buckets
        if bucket.trained
        for place, name in enumerate(bucket.params)
    }
    theirs = {name: manifest.param_groups[i] for name, i in manifest.group_of.items()}
    for name, (group, shape) in sorted(mine.items()):
        if name not in theirs:
            yield f"{name} was not trained"
        elif group.optimizer != theirs[name].optimizer:
            yield f"{name} was trained by {theirs[name].optimizer}, here by {group.optimizer}"
        else:
            kept = {piece for piece, _ in state_pieces(theirs[name], shape)}
            missing = [p for p, _ in state_pieces(group, shape) if p not in kept]
            if missing:
                yield f"{name} was trained without {', '.join(missing)}, which it needs here"


def options_of(manifest: Manifest, plan: Plan) -> list[dict[str, Any]]:
    """What parameter groups were set to, but for arguments that they have in another way now."""
    before, now = manifest.param_groups, plan.param_groups
    if len(before) != len(now):
        return []
    return [
        {key: value for key, value in options.items() if _in_file(old, key) == _in_file(new, key)}
        for options, old, new in zip(manifest.options, before, now, strict=False)
    ]


def _in_file(group: ParamGroup, key: str) -> bytes:
    """An argument of an optimizer as a file has it: a tuple is a list there."""
    return msgspec.json.encode((group.optimizer, group.label, group.options.get(key)))
