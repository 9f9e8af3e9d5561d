"""Weight files: a plan in; safetensors files with their headers, and where each tensor lies, out."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec

from piper.errors import RunError
from piper.ir.tensor_type import dtype_bytes
from piper.plan.types import Plan
from piper.stored.safetensors_index import CODES

INDEX = "model.safetensors.index.json"
OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?$")
_ALIGNED = 64  # bytes: where elements begin


class Place(msgspec.Struct, frozen=True):
    """Where a whole tensor lies, one row after the other, and in which dtype."""

    file: str
    offset: int
    dtype: str


class WeightFile(msgspec.Struct, frozen=True):
    """A file by its first bytes and its size."""

    name: str
    header: bytes
    size: int


class WeightFiles(msgspec.Struct, frozen=True):
    """Files, places by the plan's names of tensors, and the index where there are several files."""

    files: tuple[WeightFile, ...]
    places: dict[str, Place]
    index: bytes | None
    dtype: str  # of the first floating-point tensor


class FileTensor(msgspec.Struct, frozen=True):
    """A tensor of a file."""

    name: str  # as the state_dict calls it
    tensor: str  # as the plan does
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)


def weight_files(plan: Plan, *, dtype: str | None, shard_size: int) -> WeightFiles:
    """Files of at most so many bytes each, or of one tensor; floating-point tensors in a dtype, or as
    they are kept. Of names that are tied the first has the tensor."""
    names: dict[str, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in plan.state_names.items():
        if names.setdefault(tensor, name) != name:
            tied[name] = names[tensor]
    masters = {name: b.master for b in plan.buckets if b.trained for name in b.params}
    tensors = [
        FileTensor(name, tensor, _dtype(plan, tensor, masters, dtype), _shape(plan, tensor))
        for tensor, name in names.items()
    ]
    for each in tensors:
        if each.dtype not in CODES:
            raise RunError(f"{each.name} is {each.dtype}", legal=", ".join(CODES))
    shards = _shards(tensors, shard_size)
    files: list[WeightFile] = []
    places: dict[str, Place] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        header, offsets = header_of(shard, tied)
        size = len(header) + sum(each.num_bytes for each in shard)
        files.append(WeightFile(file, header, size))
        places |= {
            each.tensor: Place(file, offset, each.dtype)
            for each, offset in zip(shard, offsets, strict=True)
        }
        weight_map |= {each.name: file for each in shard}
    index = None
    if len(files) > 1:
        total = sum(each.num_bytes for each in tensors)
        order = {each.name: weight_map[each.name] for each in tensors}
        facts = {"metadata": {"total_size": total}, "weight_map": order}
        index = msgspec.json.format(msgspec.json.encode(facts), indent=2)
    floats = (each.dtype for each in tensors if "float" in each.dtype)
    return WeightFiles(tuple(files), places, index, next(floats, ""))


def _dtype(plan: Plan, tensor: str, masters: Mapping[str, str], wanted: str | None) -> str:
    kept = plan.tensors[tensor].dtype
    if wanted is not None and "float" in kept:
        return wanted
    return masters.get(tensor, kept)


def _shape(plan: Plan, tensor: str) -> tuple[int, ...]:
    return plan.tensors[tensor].shape


def _shards(tensors: list[FileTensor], limit: int) -> list[list[FileTensor]]:
    shards: list[list[FileTensor]] = [[]]
    size = 0
    for each in tensors:
        if shards[-1] and size + each.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(each)
        size += each.num_bytes
    return [widest_first(shard) for shard in shards]


def widest_first(tensors: list[FileTensor]) -> list[FileTensor]:
    """The order in which all lie at a multiple of the size of their elements."""
    return sorted(tensors, key=lambda each: -dtype_bytes(each.dtype))


def header_of(shard: list[FileTensor], tied: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """The bytes before a file's elements, and where each tensor begins in the file."""
    mine = {each.name for each in shard}
    about = {"format": "pt", **{name: of for name, of in tied.items() if of in mine}}
    facts: dict[str, object] = {"__metadata__": about}
    begins, at = [], 0
    for each in shard:
        end = at + each.num_bytes
        shape, dtype = list(each.shape), CODES[each.dtype]
        facts[each.name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        begins.append(at)
        at = end
    text = msgspec.json.encode(facts)
    text += b" " * (-(8 + len(text)) % _ALIGNED)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + begin for begin in begins]
