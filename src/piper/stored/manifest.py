"""Manifest: what a saved run is, beside its tensors: `piper.json` in the folder of a checkpoint."""

from __future__ import annotations

import os
import zlib
from typing import Any
from urllib.parse import unquote

import msgspec

from piper.errors import FileError
from piper.files import PLAN_LIMIT, excess, read_bytes
from piper.ir.history import history_as_code
from piper.ir.tensor_type import TensorType
from piper.plan.types import ParamGroup, Plan
from piper.stored.checked_index import is_possible
from piper.stored.stored_pieces import Piece, Stored, StoredState, StoredTensor

FORMAT = 1
NAME = "piper.json"
_DEPTHS = {"model": 2, "ema": 2, "optimizer": 3}  # keys from the root of a state_dict to a tensor


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`tensors` are named by where they lie in a nested state_dict, joined by dots, and `paths` has that
    way for each. Files are named without their folder. `training` is what a loop wants to find again.
    """

    format: int = FORMAT
    piper: str
    steps: int
    evaluations: int = 0  # each draws other random numbers
    seed: int
    mesh: str
    plan: str  # its hash
    history: list[str]  # the strategy as code
    data_ranks: int
    num_microbatches: int
    ema: float | None
    param_groups: tuple[ParamGroup, ...]
    group_of: dict[str, int]  # trained parameter -> its parameter group
    options: list[dict[str, Any]]  # per parameter group, what it was set to since
    tensors: dict[str, StoredTensor]
    paths: dict[str, tuple[str, ...]]
    training: dict[str, Any] = {}

    @property
    def num_bytes(self) -> int:
        """In the files of tensors."""
        return sum(piece.length for t in self.tensors.values() for piece in t.pieces)

    def state(self, folder: str) -> StoredState:
        """The index of all tensors, with the paths of their files."""
        model: Stored = {}
        averages: Stored = {}
        optimizer: dict[str, Stored] = {}
        for name, tensor in self.tensors.items():
            section, own, *rest = self.paths[name]
            found = msgspec.structs.replace(
                tensor, pieces=tuple(_located(piece, folder) for piece in tensor.pieces)
            )
            if section == "optimizer":
                optimizer.setdefault(own, {})[rest[0]] = found
            else:
                (averages if section == "ema" else model)[own] = found
        return StoredState(model, averages, optimizer, self.steps, self.evaluations)


def _located(piece: Piece, folder: str) -> Piece:
    return msgspec.structs.replace(piece, file=os.path.join(folder, piece.file))


def manifest_of(plan: Plan, **facts: Any) -> Manifest:
    """What is known of a plan, and the other fields."""
    groups = {
        unquote(name): bucket.group_of(place)
        for bucket in plan.buckets
        if bucket.trained
        for place, name in enumerate(bucket.params)
    }
    return Manifest(
        seed=plan.seed,
        mesh=str(plan.mesh),
        plan=plan.content_hash(),
        history=history_as_code(plan.history).splitlines(),
        data_ranks=plan.num_data_ranks,
        num_microbatches=plan.num_microbatches,
        ema=plan.ema,
        param_groups=plan.param_groups,
        group_of=groups,
        **facts,
    )


def encoded(manifest: Manifest) -> bytes:
    """A line with the checksum of all that follows, then the manifest."""
    body = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    return b'{"crc": %d}\n' % zlib.crc32(body) + body + b"\n"


def decoded(data: bytes, path: str) -> Manifest:
    """The manifest, if it is whole and of a format that is known."""
    head, _, body = data.partition(b"\n")
    body = body.removesuffix(b"\n")
    if head != b'{"crc": %d}' % zlib.crc32(body):
        raise FileError(f"{path} is damaged: its checksum is another one")
    if problem := excess(body):
        raise FileError(f"{path} is damaged: {problem}")
    try:
        found = msgspec.json.decode(body, type=_Format).format
        if found != FORMAT:
            raise FileError(
                f"{path} is of format {found}", legal=f"format {FORMAT}, which this version reads"
            )
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path} is no manifest: {error}") from None
    if problem := _problem(manifest):
        raise FileError(f"{path} is no manifest: {problem}")
    return manifest


def _problem(manifest: Manifest) -> str:
    """What cannot be of a run that was saved."""
    if manifest.steps < 0 or manifest.evaluations < 0:
        return "it counts fewer than 0 steps"
    if manifest.paths.keys() != manifest.tensors.keys():
        return "not every tensor has a path"
    for name, path in manifest.paths.items():
        if len(path) != _DEPTHS.get(path[0] if path else ""):
            return f"{name} has the path {path}"
    for name, tensor in manifest.tensors.items():
        if not TensorType(tensor.shape, tensor.dtype).possible:
            return f"{name} is {tensor.dtype}{list(tensor.shape)}"
        for piece in tensor.pieces:
            inside = os.path.basename(piece.file) == piece.file and "\0" not in piece.file
            if not inside or not is_possible(piece, tensor.shape):
                return f"{name} is stored in {piece}"
    groups = range(len(manifest.param_groups))
    if any(group not in groups for group in manifest.group_of.values()):
        return "a parameter is of a group that there is not"
    return ""


class _Format(msgspec.Struct):
    format: int


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    path = os.path.join(folder, NAME)
    return decoded(read_bytes(path, limit=PLAN_LIMIT), path)
