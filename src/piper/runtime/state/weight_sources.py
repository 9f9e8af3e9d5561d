"""Weights as users have them: a state_dict, a file or a folder in, the index of its tensors out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from piper.bodies.files.torch_zip import place_of, torch_content, torch_part
from piper.errors import FileError
from piper.files import read_start
from piper.runtime.state.dcp_index import dcp_index
from piper.stored import manifest
from piper.stored.boxes import row_major, whole
from piper.stored.folders import latest
from piper.stored.safetensors_index import chosen, file_index, files_of
from piper.stored.stored_pieces import Piece, Stored, StoredTensor

NESTS = ("model", "state_dict", "model_state_dict", "module")  # keys that weights may lie under
FOLDER = (  # what a folder may have, the first counts; Hugging Face's names
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    manifest.NAME,  # a checkpoint of ours, with its checksums
    ".metadata",
)
SMALL = 16 << 10  # bytes of a piece that is read as a whole
LEGAL = "a state_dict, a .safetensors or torch.save file, or a folder with " + ", ".join(FOLDER)


@dataclass(frozen=True)
class WeightSource:
    """An index of tensors, and those of them that lie in this process's memory, each in one run."""

    stored: Stored
    memory: Mapping[str, Tensor] = field(default_factory=dict)


def weight_source(source: Any) -> WeightSource:
    """What a user gave as weights."""
    if isinstance(source, Mapping):
        return _in_memory(source)
    if isinstance(source, nn.Module):
        raise FileError("weights are a model", legal="model.state_dict()")
    if not isinstance(source, str | os.PathLike):
        raise FileError(f"weights are a {type(source).__name__}", legal=LEGAL)
    path = os.path.abspath(os.fspath(source))
    if not os.path.isdir(path):
        return WeightSource(_seen(_file(path)))
    for name in FOLDER:
        inside = os.path.join(path, name)
        if os.path.exists(inside):
            return WeightSource(_seen(_folder(path, inside)))
    newest = latest(path)  # of the checkpoints of a run
    if newest is not None:
        return WeightSource(_folder(str(newest), str(newest / manifest.NAME)))
    raise FileError(f"{path} has no weights", legal=LEGAL)


def _seen(stored: Stored) -> Stored:
    """With what shows that a file was changed since, where no checksum does."""
    files: dict[str, tuple[int, int]] = {}

    def seen(piece: Piece) -> Piece:
        if piece.crc is not None:
            return piece
        if piece.file not in files:
            try:
                about = os.stat(piece.file)
            except (OSError, ValueError) as problem:
                raise FileError(f"{piece.file!r} cannot be read: {problem}") from None
            files[piece.file] = about.st_size, about.st_mtime_ns
        return msgspec.structs.replace(piece, seen=files[piece.file])

    return {
        name: msgspec.structs.replace(tensor, pieces=tuple(map(seen, tensor.pieces)))
        for name, tensor in stored.items()
    }


def _folder(folder: str, path: str) -> Stored:
    if path.endswith(manifest.NAME):
        return manifest.read_manifest(folder).state(folder).model
    if path.endswith(".metadata"):
        return _dcp(folder)
    if not path.endswith(".json"):
        return _file(path)
    found: Stored = {}
    for file, names in files_of(path).items():
        found |= chosen(_file(file), names, file, path)
    return found


def _file(path: str) -> Stored:
    if not path.endswith(".safetensors") and read_start(path, 2)[0] == b"PK":
        return _saved_by_torch(path)
    if path.endswith((".pt", ".pth", ".bin", ".ckpt")):
        return _saved_by_torch(path)  # which says what is wrong with it
    return file_index(path)


def _saved_by_torch(path: str) -> Stored:
    content = torch_content(path)
    tensors = _unnested(content) if isinstance(content, Mapping) else {}
    if not tensors:
        raise FileError(
            f"{path} has no tensors by name", legal="torch.save(model.state_dict(), ...)"
        )
    return {name: _indexed(name, tensor, path) for name, tensor in tensors.items()}


def _indexed(name: str, tensor: Tensor, path: str) -> StoredTensor:
    shape = tuple(tensor.shape)
    offset, size = place_of(tensor, name, path), tensor.element_size()
    strides = None if tensor.is_contiguous() else tuple(tensor.stride())
    piece = Piece(whole(shape), path, offset, tensor.numel() * size, strides=strides)
    return StoredTensor(_dtype(tensor), shape, (piece,))


def _in_memory(given: Mapping[str, Any]) -> WeightSource:
    """Tensors of this process; they are read when a run starts."""
    stored: Stored = {}
    memory: dict[str, Tensor] = {}
    for name, tensor in _unnested(given).items():
        if not _is_plain(tensor):
            raise FileError(
                f"{name} in the state_dict is no plain tensor, but a {type(tensor).__name__} of "
                f"{tensor.layout} on {tensor.device}",
                legal="dense tensors, whole, with elements",
            )
        memory[name] = kept = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        shape, length = tuple(kept.shape), kept.numel() * kept.element_size()
        piece = Piece(whole(shape), name, 0, length, "memory", strides=row_major(shape))
        stored[name] = StoredTensor(_dtype(kept), shape, (piece,))
    if not stored:
        raise FileError("weights are a dict without tensors", legal=LEGAL)
    return WeightSource(stored, memory)


def _is_plain(tensor: Tensor) -> bool:
    """Whether it has all of its elements itself; a DTensor, say, is made of other tensors."""
    made_of_others = hasattr(tensor, "__tensor_flatten__")
    return tensor.layout == torch.strided and not tensor.is_meta and not made_of_others


def _unnested(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """The tensors of a dict by name or, if it has none, of the dict in it that is one of weights."""
    tensors = {str(name): found for name, found in content.items() if isinstance(found, Tensor)}
    for key in NESTS if not tensors else ():
        if isinstance(content.get(key), Mapping):
            return _unnested(content[key])
    return tensors


def _dcp(folder: str) -> Stored:
    """Likewise, of the paths of a checkpoint."""
    found = dcp_index(folder)
    for key in NESTS:
        inside = {path[1:]: tensor for path, tensor in found.items() if path[0] == key}
        if inside and () not in inside:
            found = inside
            break
    named = {".".join(map(str, path)): tensor for path, tensor in found.items()}
    return {name: _in_parts(name, tensor) for name, tensor in named.items()}


def _in_parts(name: str, tensor: StoredTensor) -> StoredTensor:
    """The same with pieces of which a part can be read, where they are worth it."""
    pieces = [_plain(name, tensor, p) if p.length > SMALL else p for p in tensor.pieces]
    return msgspec.structs.replace(tensor, pieces=tuple(pieces))


def _plain(name: str, tensor: StoredTensor, piece: Piece) -> Piece:
    """Where the elements lie in what `torch.save` wrote."""
    saved = torch_part(piece.file, piece.offset, piece.length)
    same = isinstance(saved, Tensor) and (_dtype(saved), saved.shape) == (
        tensor.dtype,
        piece.box.size,
    )
    if not same:
        raise FileError(f"{piece.file} holds something else than {name} at byte {piece.offset}")
    offset = place_of(saved, name, piece.file, offset=piece.offset)
    strides = None if saved.is_contiguous() else tuple(saved.stride())
    length = saved.numel() * saved.element_size()
    return Piece(piece.box, piece.file, offset, length, strides=strides)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
