"""Safetensors: a file in, the index of its tensors out; of it only the header is read."""

from __future__ import annotations

import math
import os

import msgspec

from piper.errors import FileError
from piper.files import PLAN_LIMIT, excess, read_bytes, read_start
from piper.stored.boxes import Box
from piper.stored.stored_pieces import Piece, Stored, StoredTensor

HEADER_LIMIT = 100_000_000  # bytes, as the format has it
DIMS_LIMIT = 64
DTYPES = {  # of the format -> torch's name, bytes of an element
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
CODES = {name: code for code, (name, _) in DTYPES.items()}


class _Entry(msgspec.Struct):
    """What a header says of a tensor; offsets are counted from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    """What `model.safetensors.index.json` says: which tensor lies in which file."""

    weight_map: dict[str, str]


def file_index(path: str) -> Stored:
    """The tensors of one file."""
    start, size = read_start(path, 8)
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(HEADER_LIMIT, size - 8):
        raise _no_safetensors(path, f"its header has {length} bytes of {size}")
    header = read_start(path, 8 + length)[0][8:]
    problem = excess(header)
    if problem:
        raise _no_safetensors(path, problem)
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        decoder = msgspec.json.Decoder(_Entry)
        found = {name: decoder.decode(raw) for name, raw in entries.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _no_safetensors(path, f"its header: {error}") from None
    return {name: _tensor(path, name, entry, 8 + length, size) for name, entry in found.items()}


def _tensor(path: str, name: str, entry: _Entry, begin: int, size: int) -> StoredTensor:
    if entry.dtype not in DTYPES:
        raise FileError(
            f"{name} in {path} is of a dtype {entry.dtype!r}", legal=", ".join(sorted(DTYPES))
        )
    dtype, width = DTYPES[entry.dtype]
    first, last = entry.data_offsets
    if len(entry.shape) > DIMS_LIMIT or min(entry.shape, default=0) < 0:
        raise _no_safetensors(path, f"{name} has no shape that a tensor can have")
    if not 0 <= first <= last <= size - begin or last - first != width * math.prod(entry.shape):
        raise _no_safetensors(path, f"the bytes of {name} are not {dtype}{list(entry.shape)}")
    box = Box((0,) * len(entry.shape), entry.shape)
    return StoredTensor(dtype, entry.shape, (Piece(box, path, begin + first, last - first),))


def _no_safetensors(path: str, why: str) -> FileError:
    return FileError(f"{path} is no safetensors file: {why}", legal="a whole file")


def files_of(path: str) -> dict[str, list[str]]:
    """The files that an index of Hugging Face's kind names, each with its tensors."""
    data = read_bytes(path, limit=PLAN_LIMIT)
    problem = excess(data)
    try:
        if problem:
            raise msgspec.DecodeError(problem)
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"{path} is no index of weights: {error}") from None
    files: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        if os.path.basename(file) != file or file in ("", ".", ".."):
            raise FileError(f"{path} names a file {file!r}", legal="files of the same folder")
        files.setdefault(os.path.join(os.path.dirname(path), file), []).append(name)
    return files


def chosen(tensors: Stored, names: list[str], file: str, index: str) -> Stored:
    """The tensors of a file that an index says lie there."""
    missing = sorted(set(names) - tensors.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise FileError(f"{file} has no {missing[0]}{more}", legal=f"what {index} says")
    return {name: tensors[name] for name in names}
