"""Torch's distributed checkpoints: a folder in, the index of its tensors out."""

from __future__ import annotations

import importlib
import io
import os
import pickle
from typing import Any

import torch

from piper.errors import FileError
from piper.files import PLAN_LIMIT, read_bytes
from piper.stored.boxes import Box
from piper.stored.stored_pieces import Piece, Stored, StoredTensor

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "BytesStorageMetadata")),
    *((_METADATA, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "Path")),
}
_LEGAL = "a folder that torch.distributed.checkpoint.save wrote"
Path = tuple[str | int, ...]  # through dicts and lists to a tensor


class _Unpickler(pickle._Unpickler):
    """Makes what a checkpoint's metadata consists of, and nothing else. Python's own: the one in C takes
    gigabytes for a damaged number of an object."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return getattr(importlib.import_module(module), name)


def dcp_index(folder: str) -> dict[Path, StoredTensor]:
    """All tensors of a checkpoint, by the path of keys under which they were saved."""
    path = os.path.join(folder, ".metadata")
    data = read_bytes(path, limit=PLAN_LIMIT)
    try:
        metadata = _Unpickler(io.BytesIO(data)).load()
        found = _tensors(folder, metadata)
        paths = getattr(metadata, "planner_data", None) or {}
        return {tuple(paths.get(name) or (name,)): tensor for name, tensor in found.items()}
    except FileError:
        raise
    except Exception as problem:  # whatever damaged bytes lead to
        raise FileError(f"{path} is no metadata of a checkpoint: {problem}", legal=_LEGAL) from None


def _tensors(folder: str, metadata: Any) -> Stored:
    pieces: dict[str, list[Piece]] = {}
    about = metadata.state_dict_metadata
    for index, info in metadata.storage_data.items():
        size = _size(about[index.fqn], index.offset)
        if size is None:
            continue
        file = info.relative_path
        if os.path.isabs(file) or ".." in file.split("/"):
            raise FileError(f"{folder} names a file {file!r}", legal="files of the same folder")
        if getattr(info, "transform_descriptors", None):
            raise FileError(
                f"{index.fqn} in {folder} is transformed ({info.transform_descriptors[0]})",
                legal="a checkpoint that is not compressed",
            )
        box = Box(tuple(map(int, index.offset)), size)
        piece = Piece(box, os.path.join(folder, file), int(info.offset), int(info.length), "torch")
        pieces.setdefault(index.fqn, []).append(piece)
    return {
        name: StoredTensor(
            str(tensor.properties.dtype).removeprefix("torch."),
            tuple(map(int, tensor.size)),
            tuple(pieces.get(name, ())),
        )
        for name, tensor in about.items()
        if hasattr(tensor, "chunks")
    }


def _size(tensor: Any, offset: Any) -> tuple[int, ...] | None:
    """Of the chunk of a tensor that begins there; None if it is none of a tensor."""
    for chunk in getattr(tensor, "chunks", ()):
        if tuple(chunk.offsets) == tuple(offset or ()):
            return tuple(map(int, chunk.sizes))
    return None
