"""Torch's own index of a checkpoint: a manifest in, the bytes of its `.metadata` out."""

from __future__ import annotations

import pickle

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from piper.stored.manifest import Manifest

NAME = ".metadata"


def torch_metadata(manifest: Manifest) -> bytes:
    """So that torch.distributed.checkpoint reads the folder, whoever wrote it."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for name, tensor in manifest.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(piece.box.start), torch.Size(piece.box.size))
            for piece in tensor.pieces
        ]
        properties = TensorProperties(dtype=getattr(torch, tensor.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, piece in enumerate(tensor.pieces):
            index = MetadataIndex(name, piece.box.start, number)
            places[index] = _StorageInfo(piece.file, piece.offset, piece.length)
    paths = dict(manifest.paths)
    return pickle.dumps(Metadata(tensors, planner_data=paths, storage_data=places))
